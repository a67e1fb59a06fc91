"""mlx_lm reports how far it is in a long prompt, whatever the caches are."""

import mlx_lm

import veloxfn
from veloxfn_mlx_adapter import make_prompt_cache


def test_generate_reports_the_prompt_chunk_by_chunk(smollm2):
    caches = make_prompt_cache(smollm2.model, veloxfn.policy_for("h2o", budget=32, age_normalised=True))
    calls = []
    mlx_lm.generate(
        smollm2.model,
        smollm2.tokenizer,
        list(range(1000, 1100)),
        max_tokens=2,
        prompt_cache=caches,
        prefill_step_size=40,
        prompt_progress_callback=lambda read, total: calls.append((read, total)),
    )
    assert calls == [(0, 100), (40, 100), (80, 100), (99, 100), (100, 100)]
    assert caches[0].tokens_seen == 102
