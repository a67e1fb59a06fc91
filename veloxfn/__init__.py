"""veloxfn: KV-cache eviction for MLX decoders, as pure functions over batched arrays.

from veloxfn import h2o

policy = h2o.policy(h2o.Config(budget=512))
state = policy.init_state(rows=8, key_dim=64, dtype=mx.float16)
state = policy.absorb(state, keys, values)                # write the block's K and V: nothing is lost yet
output, state = veloxfn.attend(policy, state, queries)    # attend to all of it, then let go of the weakest
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from veloxfn import budgets, cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.accounting import (
    allocated_bytes,
    compression_ratio,
    full_bytes,
    kept_bytes,
    tokens_kept,
    tokens_seen,
)
from veloxfn.attention import attend
from veloxfn.base import Policy, Retention, Slots
from veloxfn.binding import bind
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
    "pyramidkv",
    "snapkv",
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
