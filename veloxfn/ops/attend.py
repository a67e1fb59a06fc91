"""Attention of a few queries and what each slot receives from it, in one pass over keys and values.

    A[h, j] = softmax_j(scale q_h . k_j)                               over the slots visible to the query
    output_h = sum_j A[h, j] v_j
    mass_j = sum_t mean_g A[g t, j]                                    or of the tempered softmax, for the mass alone

On a GPU two launches, whatever the number of slots: parts of a row, each by a threadgroup of its own, then their sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.attention_mass import Temper, attention_mass, noisy
from veloxfn.ops.constants import NO_SCHEDULE, Schedule, bits, constant, numbers
from veloxfn.ops.evict_step import UNIT, Parts, Rule, combine, stepped
from veloxfn.ops.launch import Body, Kernel, Output, Template, backend_for, launch
from veloxfn.ops.noise import halves
from veloxfn.ops.weights import ready, softmax

__all__ = ["KERNEL", "KEYS_ALONE", "attend", "attend_step", "reference", "rescaled", "visible_mass"]

_TEMPER_INPUTS = ("heat", "names", "newest", "seed", "streams")
KERNEL = Kernel(
    "attend",
    ("queries", "keys", "values", "positions", "until", "arrived", *_TEMPER_INPUTS),
    ("scratch",),
    absent=("fresh_key", "fresh_value"),  # token_step's
    unmade=("keys_out", "values_out"),
)
KEYS_ALONE = KERNEL._replace(
    name="attend_keys",
    inputs=tuple(name for name in KERNEL.inputs if name != "values"),
    bodies=(Body("attend", (("values", "keys"),)),),  # which the template says are not read
)

LANES = 256
_MOST_HEADS = 128  # query heads times queries of a row
_MOST_DIM = 256
_MOST_PARTS = 32
_GROUPS = 1024  # threadgroups that keep a large GPU busy to the end
_LOAD = 16  # bytes of a lane's load
_MATRIX_ELEMENTS = 2**22  # attention weights that the reference makes at once
_EVERY_POSITION = 2**30


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    until: mx.array | None = None,
    *,
    scale: float | None = None,
    temper: Temper | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention and the mass that it gives to every slot.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others. Values are
    finite, those of free slots and of such slots, too: 0 times NaN is NaN.

    Args:
        queries: [N, G, S, D], G query heads per row.
        keys: [N, n, D].
        values: [N, n, Dv].
        positions: [N, n] int32 of the slots, -1 = free.
        until: [N, S] int32: query t sees the live slots at positions up to until[t]; one that sees none gives zeros.
            None = the queries are those of the S newest tokens, in order, none of them padded; a single one sees every
            live slot.
        scale: of the products; None = D ** -0.5.
        temper: temperature and noise of the logits that the mass is made of; the output is plain attention.
        backend: see `veloxfn.ops.launch.backend_for`. On a GPU many queries, without `until`, go through MLX's own
            attention, causal in the order of the slots, in which a free slot is seen and a product that is not finite
            spoils its query, and `attention_mass`.

    Returns:
        output [N, G, S, Dv] in the dtype of the queries, and mass [N, n] float32: sums over the queries of means over
        the heads.

    Raises:
        ValueError: a wrong shape, or a scale that is negative or not finite.
        TypeError: an array of another type.
    """
    checks.attention(queries, keys, values, positions, until, *_of(temper))
    rows, _, count, dim = queries.shape
    scale = dim**-0.5 if scale is None else _checked(scale)
    in_order = until is None
    if until is None and count > 1:
        newest = mx.max(positions, axis=1, keepdims=True)
        until = newest - (count - 1) + numbers(count)
    backend = backend_for(backend)
    if backend != "reference" and fits(queries, keys, values):
        parts = _parts(queries, keys, values, positions, until, scale, temper, None, backend)
        return cast("tuple[mx.array, mx.array]", combine(parts, positions, backend))
    if until is None:
        until = constant(_EVERY_POSITION, (rows, 1), mx.int32)
    if backend == "reference" or not in_order:
        return reference(queries, keys, values, positions, until, scale=scale, temper=temper)
    output = mx.fast.scaled_dot_product_attention(queries, keys[:, None], values[:, None], scale=scale, mask="causal")
    mass = attention_mass(rescaled(queries, scale), keys, positions, until, None, temper, backend=backend)
    return output.astype(queries.dtype), mass


def rescaled(queries: mx.array, scale: float) -> mx.array:
    """Queries whose products are to be scaled by D ** -0.5, in place of by `scale`; float32 where that would round."""
    factor = scale * math.sqrt(queries.shape[-1])
    if math.isclose(factor, 1.0):
        return queries
    nearest = math.ldexp(1.0, round(math.log2(factor))) if factor else 0.0
    if factor < 1.0 and math.isclose(factor, nearest):
        return queries * nearest
    return queries.astype(mx.float32) * factor


def _checked(scale: float) -> float:
    checks.number("scale", scale, low=0.0)
    return scale


def _of(temper: Temper | None) -> tuple[mx.array | None, mx.array | None]:
    return (None, None) if temper is None else (temper.tau, temper.names)


def reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    until: mx.array,
    *,
    scale: float | None = None,
    temper: Temper | None = None,
) -> tuple[mx.array, mx.array]:
    """`attend` in MLX's own primitives: each tile's matrix of weights is used for the output and for the mass."""
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    scale = dim**-0.5 if scale is None else scale
    heads, wide = ready(queries, keys, grows=scale > 1, scale=scale)
    contents = values.astype(mx.float32)
    tile = max(1, _MATRIX_ELEMENTS // (rows * groups * length))
    outputs: list[mx.array] = []
    mass = None
    for start in range(0, count, tile):
        now = slice(start, min(start + tile, count))
        some = heads[:, :, now]
        if outputs:
            some = mx.depends([some], [outputs[-1]])[0]  # one tile in memory at a time
        slots = positions[:, None]
        visible = mx.logical_and(slots >= 0, slots <= until[:, now, None])[:, None]
        logits = (some.reshape(rows, -1, dim) @ wide).reshape(rows, groups, -1, length)
        shares = softmax(logits, visible)
        made = (shares.reshape(rows, -1, length) @ contents).reshape(*shares.shape[:3], values.shape[2])
        outputs.append(made)
        if temper is not None:
            shares = softmax(noisy(logits / temper.tau[:, None, now, None], temper, positions, now), visible)
        part = shares.squeeze((1, 2)) if groups == shares.shape[2] == 1 else mx.sum(shares, axis=(1, 2)) * (1 / groups)
        mass = part if mass is None else mass + part
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
    return output.astype(queries.dtype), cast(mx.array, mass)


def attend_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array | None,
    positions: mx.array,
    seen: mx.array,
    mass: mx.array | None,
    *,
    scale: float | None = None,
    temper: Temper | None = None,
    arrived: mx.array | None = None,
    decay: float = 1.0,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    schedule: Schedule | None = None,
    keep_low: bool = False,
    attended: bool = True,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> tuple[mx.array | None, mx.array, mx.array]:
    """`attend` for one token, then `evict_step` with the attention: two launches on a GPU.

    Args:
        queries: [N, G, 1, D] of the token that arrived last.
        keys: [N, n, D].
        values: [N, n, Dv]; None = no output is asked for.
        positions: [N, n] int32 of the slots, -1 = free.
        seen: [N] int32, arrivals so far.
        mass: [N, n] float32; None = 0.
        scale: see `attend`; not given without values.
        temper: see `attend`.
        arrived: [N, 1] int32, slot of the token, -1 = padded: its query sees nothing; None = none is padded.
        decay: see `evict_step`, as the others.
        counted: [N] int32.
        noise: [N, n] float32.
        tau: [N] float32.
        schedule: of tau.
        keep_low: rank by the negative.
        attended: whether the masses take in the attention.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        output [N, G, 1, Dv] or None, mass [N, n] float32 and positions [N, n] int32 after the eviction.

    Raises:
        ValueError: more than one query, or one of noise and tau without the other.
    """
    checks.attention(queries, keys, values, positions, None, *_of(temper))
    rows, _, count, dim = queries.shape
    if count != 1:
        raise ValueError(f"attend_step takes the query of one token, got S = {count}")
    rule = Rule(arrived, decay, counted, noise, tau, schedule, keep_low, sink, recent)
    rule.check(positions, seen, mass)
    if values is None and scale is not None:
        raise ValueError(f"scale is for the output, which values=None does without, got scale={scale}")
    backend = backend_for(backend)
    if backend == "reference" or not fits(queries, keys, values):
        until = None
        if values is None or arrived is not None:
            until = constant(_EVERY_POSITION, (rows, 1), mx.int32)
            until = until if arrived is None else mx.where(arrived >= 0, until, -1)
        if values is None:
            output, attention = (
                None,
                attention_mass(queries, keys, positions, cast(mx.array, until), None, temper, backend=backend),
            )
        else:
            output, attention = attend(
                queries, keys, values, positions, until, scale=scale, temper=temper, backend=backend
            )
        after, left, _ = stepped(positions, seen, mass, attention if attended else None, rule, backend)
        return output, after, left
    scale = dim**-0.5 if scale is None else _checked(scale)
    parts = _parts(queries, keys, values, positions, None, scale, temper, None, backend, attended, arrived)
    after, left, output = stepped(positions, seen, mass, None, rule, backend, parts)
    return output, after, left


def visible_mass(
    queries: mx.array,
    keys: mx.array,
    positions: mx.array,
    until: mx.array,
    weights: mx.array | None,
    temper: Temper | None,
    backend: str,
) -> mx.array | None:
    """`attention_mass` of a few queries by the kernels of `attend`, without an output; None where they do not fit."""
    if not fits(queries, keys, None):
        return None
    scale = queries.shape[3] ** -0.5
    parts = _parts(queries, keys, None, positions, until, scale, temper, weights, backend)
    return combine(parts, positions, backend)[1]


def fits(queries: mx.array, keys: mx.array, values: mx.array | None) -> bool:
    _, groups, count, dim = queries.shape
    wide = 1 if values is None else values.shape[2]
    alike = queries.dtype == keys.dtype and (values is None or values.dtype == keys.dtype)
    return groups * count <= _MOST_HEADS and dim <= _MOST_DIM and 0 < wide <= _MOST_DIM and alike


def _parts(
    queries: mx.array,
    keys: mx.array,
    values: mx.array | None,
    positions: mx.array,
    until: mx.array | None,
    scale: float,
    temper: Temper | None,
    weights: mx.array | None,
    backend: str,
    attended: bool = True,
    arrived: mx.array | None = None,
) -> Parts:
    rows, groups, count, dim = queries.shape
    wide = None if values is None else values.shape[2]
    plan = plan_of(rows, groups * count, count, dim, wide, positions.shape[1], queries.dtype, attended, temper, scale)
    made = launch(
        KERNEL if values is not None else KEYS_ALONE,
        backend,
        [
            queries,
            keys,
            *([] if values is None else [values]),
            positions,
            until,
            arrived,
            *tempering(temper, rows, groups * count, count),
        ],
        [plan.scratch],
        template={
            **plan.template,
            "LIMITED": until is not None,
            "GUARDED": arrived is not None,
            "CARRIES": False,
            "APART": 0,
            "PACK": 1,
        },
        groups=(rows, plan.parts, plan.chunks),
        threads=LANES,
    )
    return Parts(
        made[0],
        weights,
        None if wide is None else ((rows, groups, count, wide), queries.dtype),
        attended,
        {**plan.joining, "WEIGHTED": weights is not None},
    )


class Plan(NamedTuple):
    """How the attention of a few queries is spread over a GPU."""

    parts: int  # of a row
    chunks: int  # of its heads
    scratch: Output
    template: Template  # of attend
    joining: Template  # of evict_step behind it


def plan_of(
    rows: int,
    heads: int,
    count: int,
    dim: int,
    wide: int | None,
    length: int,
    dtype: mx.Dtype,
    attended: bool,
    temper: Temper | None,
    scale: float,
) -> Plan:
    """The plan for `heads` queries, `count` of each query head, of so many rows.

    Args:
        rows: N.
        heads: G S.
        count: S.
        dim: D.
        wide: Dv; None = no output is asked for.
        length: n.
        dtype: of queries, keys and values.
        attended: whether the mass is asked for.
        temper: of its logits.
        scale: of the products.
    """
    together = 1
    while together < min(heads, 8 if max(dim, wide or 1) <= 128 else 4):
        together *= 2
    chunks = -(-heads // together)
    units = max(1, -(-length // UNIT))
    parts = parts_of(rows * chunks, units)
    slots = -(-units // parts) * UNIT
    parts = max(1, -(-length // slots))
    block = 4 + (wide or 0) + (slots if attended else 0)
    lanes, width = _lanes(max(dim, wide or 1), together, dtype.size)
    by_recipe = temper is not None and temper.recipe is not None and count == 1
    schedule = temper.recipe.schedule if by_recipe and temper is not None and temper.recipe is not None else NO_SCHEDULE
    shared: Template = {"T": dtype, "DV": wide or 1, "COUNT": count, "UNIT": UNIT, "VALUED": wide is not None}
    return Plan(
        parts,
        chunks,
        ((rows, parts, heads * block), mx.float32),
        {
            **schedule.template,
            **shared,
            "D": dim,
            "RECEIVES": attended,
            "HEADS": together,
            "LANES": lanes,
            "WIDE": width,
            "SCALE": bits(scale),
            "TEMPERED": temper is not None,
            "NOISY": temper is not None and temper.names is not None,
            "RECIPE": by_recipe,
        },
        {**shared, "JOINS": True, "ALL": heads},
    )


def parts_of(rows: int, units: int) -> int:
    """Threadgroups, one of which takes a unit at least, for each of so many rows."""
    return max(1, min(_MOST_PARTS, -(-_GROUPS // rows), units))


def _lanes(dim: int, together: int, size: int) -> tuple[int, int]:
    """Lanes that share a slot, and elements of their loads, for so many dimensions, heads and bytes of an element.

    Every head needs registers for its query and its output, so that more heads leave a lane fewer dimensions.
    """
    most = min(2 * _LOAD // size, 16 if together == 1 else 8 if together <= 4 else 4)
    lanes = 8
    while lanes < 32 and lanes * most < dim:
        lanes *= 2
    width = 1
    while width < _LOAD // size and lanes * width < dim:
        width *= 2
    return lanes, width


def tempering(temper: Temper | None, rows: int, heads: int, count: int) -> list[mx.array | None]:
    """The kernels' inputs of a temper: arrays, or what they make them of."""
    if temper is None:
        return [None] * len(_TEMPER_INPUTS)
    if temper.recipe is not None and count == 1:
        recipe = temper.recipe
        noise = [None, None] if recipe.seed is None else [halves(recipe.seed), recipe.streams]
        return [None, None, recipe.seen, *noise]
    names = None if temper.names is None else temper.names.reshape(rows, heads).view(mx.uint32)
    return [temper.tau, names, None, None, None]
