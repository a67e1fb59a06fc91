"""veloxfn: KV-cache eviction for MLX decoders, as pure functions over batched arrays.

from veloxfn import h2o

policy = h2o.policy(h2o.Config(budget=512))
state = policy.init_state(rows=8, key_dim=64, dtype=mx.float16)
state = policy.absorb(state, keys, values)                # write the block's K and V: nothing is lost yet
output, state = veloxfn.attend(policy, state, queries)    # attend to all of it, then let go of the weakest

`veloxfn.step(policy, state, keys, values, queries)` is both in one call.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from veloxfn import budgets, cam, checks, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.accounting import (
    allocated_bytes,
    compression_ratio,
    full_bytes,
    kept_bytes,
    tokens_kept,
    tokens_seen,
)
from veloxfn.attention import attend, step
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
from veloxfn.checks import SettingError
from veloxfn.placement import Absolute, Contiguous, Rope
from veloxfn.reading import candidate_mask, candidates, next_position
from veloxfn.slots import concat_rows, kept_positions, streams, take_rows

__all__ = [
    "METHODS",
    "Absolute",
    "Contiguous",
    "Policy",
    "Retention",
    "Rope",
    "SettingError",
    "Slots",
    "allocated_bytes",
    "attend",
    "bind",
    "budgets",
    "cam",
    "candidate_mask",
    "candidates",
    "compression_ratio",
    "concat_rows",
    "full_bytes",
    "h2o",
    "kept_bytes",
    "kept_positions",
    "keyformer",
    "knorm",
    "next_position",
    "policy",
    "policy_for",
    "pyramidkv",
    "snapkv",
    "step",
    "streaming_llm",
    "streams",
    "take_rows",
    "tokens_kept",
    "tokens_seen",
    "tova",
]

METHODS: dict[str, ModuleType] = {
    "h2o": h2o,
    "keyformer": keyformer,
    "cam": cam,
    "tova": tova,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "knorm": knorm,
    "streaming_llm": streaming_llm,
}
"""Every method by name: its row puts it into the tests, laws, adapter tests and the command line."""


def policy(config: Retention) -> Policy[Any]:
    """The method that `config` belongs to, with `config` bound.

    Raises:
        TypeError: `config` is the Config of no registered method.

    >>> policy(knorm.Config(budget=64)).config.budget
    64
    """
    for module in METHODS.values():
        if type(config) is module.Config:
            bound: Policy[Any] = module.policy(config)
            return bound
    names = ", ".join(f"{name}.Config" for name in METHODS)
    raise TypeError(f"policy takes one of {names}; got {type(config).__name__}")


def policy_for(name: str, /, *, scorer: str | None = None, **settings: Any) -> Policy[Any]:
    """A method by its name, with its settings bound: what `policy` makes of the method's Config.

    Args:
        name: of the method, a key of `METHODS`.
        scorer: name of the method that ranks, for a method over one (`pyramidkv`); None = the method's own choice.
        settings: of the method's Config by name, such as budget=256; what is not given has the Config's default. For a
            method over a scorer, budget, placement, cadence, shared_heads, sink and what it does not have itself are
            the scorer's.

    Raises:
        ValueError: an unknown name or setting (`SettingError`), or a value against the rules; the message holds the
            value and what is allowed.
        TypeError: a value of another type.

    >>> policy_for("knorm", budget=64, keep="high").config.keep
    'high'
    >>> policy_for("pyramidkv", scorer="h2o", layers=30, budget=64, taper=1.5).config.scorer.budget
    64
    """
    module = _method("name", name)
    names = [field.name for field in dataclasses.fields(module.Config)]
    if "scorer" in names:
        shared = {field.name for field in dataclasses.fields(Retention)}
        own = {key: value for key, value in settings.items() if key in names and key not in shared}
        if scorer is None:
            chosen = type(module.Config(**own).scorer)
            scorer = next(key for key, other in METHODS.items() if other.Config is chosen)
        _method("scorer", scorer)
        theirs = {key: value for key, value in settings.items() if key not in own}
        settings = own | {"scorer": policy_for(scorer, **theirs).config}
    elif scorer is not None:
        raise SettingError("scorer", f"{name} ranks by itself, got {scorer!r}")
    for key in settings:
        if key not in names:
            raise SettingError(key, f"{name} has no such setting; it has {', '.join(names)}")
    return policy(module.Config(**settings))


def _method(what: str, name: object) -> ModuleType:
    """The module of a method; `what` the name stands for is said in errors."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {name!r} ({type(name).__name__})")
    checks.choice(what, name, tuple(METHODS))
    return METHODS[name]
