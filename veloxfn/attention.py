"""A decoder's attention over a bounded cache, and the eviction that it pays for."""

from __future__ import annotations

from typing import Any, TypeVar

import mlx.core as mx

from veloxfn import checks, ops
from veloxfn.base import Policy, Retention, State
from veloxfn.binding import attended_of, entries_of, is_own, module_of, ranking_of
from veloxfn.ops.attend import rescaled
from veloxfn.reading import candidate_mask
from veloxfn.retention import attend_and_retire
from veloxfn.steady import is_steady, traced
from veloxfn.stepping import Rules, moved

__all__ = ["attend", "step"]

S = TypeVar("S", bound=State)


def attend(
    policy: Policy[S], state: S, queries: mx.array, *, scale: float | None = None, padded: bool = False
) -> tuple[mx.array, S]:
    """Attention of the block that was absorbed last, then `evict`: what stands between `absorb` and the next layer.

    Where the block is one token, the weights are computed once for both, if the method ranks by them. On a GPU all of
    it is two launches with H2O, Keyformer, TOVA, K-norm and StreamingLLM, and two more with CaM and SnapKV.

    Args:
        policy: a method with its config bound.
        state: a state after `absorb`.
        queries: [N, G, S, D] of the block, G query heads per row.
        scale: of the products of queries and keys; None = D ** -0.5.
        padded: whether slots may be free: an arrival so far was padded (`valid` was given), rows were joined, or the
            budget was raised since. The output of a padded arrival is to be ignored.

    Returns:
        output [N, G, S, Dv] in the dtype of the queries, and the state with S = 0.

    Raises:
        ValueError: queries of another shape than [N, G, S, D], or a scale that is negative or not finite.
        TypeError: queries that are no floating numbers.

    >>> import mlx.core as mx
    >>> from veloxfn import h2o
    >>> policy = h2o.policy(h2o.Config(budget=8))
    >>> state = policy.init_state(rows=2, key_dim=4, dtype=mx.float32)
    >>> x = mx.ones((2, 20, 4))
    >>> output, state = attend(policy, policy.absorb(state, x, x), x[:, None])
    >>> output.shape, state.slots.positions.shape
    ((2, 1, 20, 4), (2, 9))
    """
    if is_steady(policy.config, state, queries, absorbed=True) and _is_plain(scale, padded) and is_own(policy):
        return traced(_attend_by, policy.config, scale, padded)(state, queries)
    return _attend(policy, state, queries, scale=scale, padded=padded)


def _is_plain(scale: Any, padded: Any) -> bool:
    return (scale is None or type(scale) in (int, float)) and isinstance(padded, bool)


def _attend_by(config: Retention, scale: float | None, padded: bool, *arrays: Any) -> tuple[mx.array, Any]:
    return _attend(module_of(config).policy(config), *arrays, scale=scale, padded=padded)


def _attend(policy: Policy[S], state: S, queries: mx.array, *, scale: float | None, padded: bool) -> tuple[mx.array, S]:
    config, (rows, count) = policy.config, state.slots.arrived.shape
    checks.array("queries", queries, "[N, G, S, D]", (rows, None, count, state.slots.keys.shape[2]))
    checks.floating("queries", queries.dtype)
    if queries.shape[1] == 0:
        raise ValueError("queries must have at least one head, got G=0")
    if scale is not None:
        checks.number("scale", scale, low=0.0)
    if count == 0:
        return mx.zeros((*queries.shape[:3], state.slots.values.shape[2]), queries.dtype), state
    keys, values = policy.candidates(state)
    evict = getattr(policy.evict, "func", policy.evict)
    ranking = ranking_of(config, evict)
    how = None if ranking is None or count > 1 or padded else ranking(config, state, queries.shape[1])
    if how is not None and how.attended == config.needs_queries:
        return attend_and_retire(state, config, how, queries, keys, values, scale=scale)
    factor = queries.shape[3] ** -0.5 if scale is None else scale
    if count == 1 and not padded:  # whatever slots are free
        output, attention = ops.attend(queries, keys, values, state.slots.positions, scale=factor)
        if (attended := attended_of(config, evict)) is not None:
            return output, attended(config, state, attention)
    else:
        output = mx.fast.scaled_dot_product_attention(
            queries,
            keys[:, None],
            values[:, None],
            scale=factor,
            mask=candidate_mask(config, state)[:, None] if padded else "causal",
        ).astype(queries.dtype)
    if not config.needs_queries:
        return output, policy.evict(state)
    return output, policy.evict(state, queries=rescaled(queries, factor))


def step(
    policy: Policy[S],
    state: S,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    *,
    scale: float | None = None,
    valid: mx.array | None = None,
    padded: bool = False,
) -> tuple[mx.array, S]:
    """`absorb`, then `attend`: a decoder layer's whole step over its cache.

    One token into a full cache is two launches on an NVIDIA GPU, for H2O, Keyformer, TOVA, K-norm and StreamingLLM,
    where keys and values are 17 MiB at most. They are copied on the way, so that there are two for a moment; `absorb`,
    then `attend` writes into them, in five launches.

    Args:
        policy: a method with its config bound.
        state: a state whose last block was evicted.
        keys: [N, S, D] of the block, in the state's dtype, as the model's attention sees them.
        values: [N, S, Dv].
        queries: [N, G, S, D], G query heads per row.
        scale: of the products of queries and keys; None = D ** -0.5.
        valid: [N, S] bool, False = padded arrival; None = all valid.
        padded: as for `attend`; True where `valid` is given.

    Returns:
        output [N, G, S, Dv] in the dtype of the queries, and the state with S = 0.

    Raises:
        ValueError: as `absorb` and `attend`.
        TypeError: likewise.

    >>> import mlx.core as mx
    >>> from veloxfn import h2o
    >>> policy = h2o.policy(h2o.Config(budget=8))
    >>> state = policy.init_state(rows=2, key_dim=4, dtype=mx.float32)
    >>> x = mx.ones((2, 20, 4))
    >>> output, state = step(policy, state, x, x, x[:, None])
    >>> output.shape, state.slots.positions.shape
    ((2, 1, 20, 4), (2, 9))
    """
    steady = is_steady(policy.config, state, keys, values, queries, valid, absorbed=False)
    if steady and _is_plain(scale, padded) and is_own(policy):
        return traced(_step_by, policy.config, scale, padded)(state, keys, values, queries, valid)
    return _step(policy, state, keys, values, queries, valid, scale=scale, padded=padded)


def _step_by(config: Retention, scale: float | None, padded: bool, *arrays: Any) -> tuple[mx.array, Any]:
    return _step(module_of(config).policy(config), *arrays, scale=scale, padded=padded)


def _step(
    policy: Policy[S],
    state: S,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    valid: mx.array | None,
    *,
    scale: float | None,
    padded: bool,
) -> tuple[mx.array, S]:
    absorb, evict = (getattr(function, "func", function) for function in (policy.absorb, policy.evict))
    ranking, entries = ranking_of(policy.config, evict), entries_of(policy.config, absorb)
    if ranking is not None and entries is not None:
        rules = Rules(entries, ranking)
        made = moved(rules, policy.config, state, keys, values, queries, valid, output=True, scale=scale)
        if made is not None and made[0] is not None:
            return made[0], made[1]
    absorbed = policy.absorb(state, keys, values, valid=valid)
    return _attend(policy, absorbed, queries, scale=scale, padded=padded or valid is not None)
