"""veloxfn for mlx_lm: eviction caches for `generate`, `stream_generate` and whatever else takes a prompt cache.

>>> import mlx_lm, veloxfn
>>> from veloxfn_mlx_adapter import load_demo, make_prompt_cache
>>> model, tokenizer = load_demo()  # or mlx_lm.load(...)
>>> policy = veloxfn.policy(veloxfn.h2o.Config(budget=512, age_normalised=True))
>>> caches = make_prompt_cache(model, policy)
>>> text = mlx_lm.generate(model, tokenizer, "The sky is", max_tokens=2, prompt_cache=caches)
"""

from __future__ import annotations

try:
    import mlx_lm as _mlx_lm  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "mlx_lm":
        raise
    raise ModuleNotFoundError(
        "veloxfn_mlx_adapter needs mlx-lm, which is not installed; run: pip install 'veloxfn[mlx-lm]'", name="mlx_lm"
    ) from None

from veloxfn_mlx_adapter.cache import EvictingCache
from veloxfn_mlx_adapter.capture import hook_installed, query_capture, remove_hook
from veloxfn_mlx_adapter.cosines import layer_cosines
from veloxfn_mlx_adapter.demo import load_demo
from veloxfn_mlx_adapter.diagnostics import LayerDiagnostics, describe, diagnostics
from veloxfn_mlx_adapter.measured import MeasuredWorse, measured_worse
from veloxfn_mlx_adapter.policies import layer_policies
from veloxfn_mlx_adapter.prompt_cache import attach, detach, make_prompt_cache
from veloxfn_mlx_adapter.ropes import rope_of

__all__ = [
    "EvictingCache",
    "LayerDiagnostics",
    "MeasuredWorse",
    "attach",
    "describe",
    "detach",
    "diagnostics",
    "hook_installed",
    "layer_cosines",
    "layer_policies",
    "load_demo",
    "make_prompt_cache",
    "measured_worse",
    "query_capture",
    "remove_hook",
    "rope_of",
]
