"""veloxfn for mlx_lm: eviction caches for `generate`, `stream_generate` and whatever else takes a prompt cache.

>>> import mlx_lm, veloxfn
>>> from veloxfn_mlx_adapter import load_demo, make_prompt_cache
>>> model, tokenizer = load_demo()  # or mlx_lm.load(...)
>>> policy = veloxfn.policy(veloxfn.h2o.Config(budget=512, age_normalised=True))
>>> caches = make_prompt_cache(model, policy)
>>> text = mlx_lm.generate(model, tokenizer, "The sky is", max_tokens=2, prompt_cache=caches)

`EvictingCache`, `attention` and the hook know nothing of mlx_lm and work without it; what does is imported when it is
first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from veloxfn_mlx_adapter.cache import EvictingCache
from veloxfn_mlx_adapter.capture import attention, hook_installed, query_capture, remove_hook
from veloxfn_mlx_adapter.diagnostics import LayerDiagnostics, describe, diagnostics
from veloxfn_mlx_adapter.measured import MeasuredWorse, measured_worse

if TYPE_CHECKING:
    from veloxfn_mlx_adapter.cosines import layer_cosines
    from veloxfn_mlx_adapter.demo import load_demo
    from veloxfn_mlx_adapter.policies import layer_policies
    from veloxfn_mlx_adapter.prompt_cache import attach, detach, make_prompt_cache
    from veloxfn_mlx_adapter.ropes import rope_of
    from veloxfn_mlx_adapter.saving import load_prompt_cache, save_prompt_cache

__all__ = [
    "EvictingCache",
    "LayerDiagnostics",
    "MeasuredWorse",
    "attach",
    "attention",
    "describe",
    "detach",
    "diagnostics",
    "hook_installed",
    "layer_cosines",
    "layer_policies",
    "load_demo",
    "load_prompt_cache",
    "make_prompt_cache",
    "measured_worse",
    "query_capture",
    "remove_hook",
    "rope_of",
    "save_prompt_cache",
]

_OF_MLX_LM = {  # name: module of this package, which needs mlx_lm
    "attach": "prompt_cache",
    "detach": "prompt_cache",
    "layer_cosines": "cosines",
    "layer_policies": "policies",
    "load_demo": "demo",
    "load_prompt_cache": "saving",
    "make_prompt_cache": "prompt_cache",
    "rope_of": "ropes",
    "save_prompt_cache": "saving",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_MLX_LM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_OF_MLX_LM[name]}")
    except ModuleNotFoundError as error:
        if error.name != "mlx_lm":
            raise
        raise ModuleNotFoundError(
            f"{name} needs mlx-lm, which is not installed; run: pip install 'veloxfn[mlx-lm]'", name="mlx_lm"
        ) from None
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
