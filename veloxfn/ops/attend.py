"""Attention of a few queries and what each slot receives from it, in one pass over keys and values.

    A[h, j] = softmax_j(scale q_h . k_j)                               over the slots visible to the query
    output_h = sum_j A[h, j] v_j
    mass_j = sum_t mean_g A[g t, j]                                    or of the tempered softmax, for the mass alone

On a GPU two launches, whatever the number of slots: parts of a row, each by a threadgroup of its own, then their sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from veloxfn.ops.attention_mass import Temper, attention_mass, noisy
from veloxfn.ops.constants import absent, constant
from veloxfn.ops.evict_step import evict_inputs, evict_step, evict_template
from veloxfn.ops.launch import Kernel, Output, backend_for, launch
from veloxfn.ops.weights import ready, softmax

__all__ = ["COMBINE", "FINISH", "KERNEL", "attend", "attend_step", "reference", "visible_mass"]

KERNEL = Kernel(
    "attend",
    ("queries", "keys", "values", "positions", "until", "scale", "heat", "names"),
    ("logits", "stats", "partial"),
)
_COMBINE_INPUTS = ("logits", "stats", "partial", "positions", "until", "heat", "names", "weights")
COMBINE = Kernel("attend_combine", _COMBINE_INPUTS, ("output", "attention"))
FINISH = Kernel(
    "attend_finish",
    (*_COMBINE_INPUTS, "seen", "mass", "decay", "counted", "noise", "tau"),
    ("output", "attention", "mass_out", "positions_out"),
    bodies=("attend_combine", "evict_step"),
)

_LANES, _FINISH_LANES = 256, 1024
_MOST_HEADS = 128  # query heads times queries of a row
_MOST_DIM = 256
_MOST_PARTS = 32
_GROUPS = 512  # threadgroups that fill a large GPU
_LEAST_SLOTS = 64  # of a part
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

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others; a free slot
    holds finite values.

    Args:
        queries: [N, G, S, D], G query heads per row.
        keys: [N, n, D].
        values: [N, n, Dv].
        positions: [N, n] int32 of the slots, -1 = free.
        until: [N, S] int32: query t sees the live slots at positions up to until[t]; one that sees none gives zeros.
            None = the queries are those of the last S slots in order, or of a single token anywhere (what `candidates`
            returns without padding).
        scale: of the products; None = D ** -0.5.
        temper: temperature and noise of the logits that the mass is made of; the output is plain attention.
        backend: see `veloxfn.ops.launch.backend_for`. Many queries go through MLX's own attention and `attention_mass`.

    Returns:
        output [N, G, S, Dv] in the dtype of the queries, and mass [N, n] float32: sums over the queries of means over
        the heads.
    """
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    scale = dim**-0.5 if scale is None else scale
    lower_right = until is None
    if until is None:
        until = positions[:, length - count :] if count > 1 else _all_positions(rows)
    backend = backend_for(backend)
    if backend != "reference" and _fits(queries, keys, values):
        return _launched(queries, keys, values, positions, until, scale, temper, None, backend)
    if rows * groups * count * length <= _MATRIX_ELEMENTS:
        return reference(queries, keys, values, positions, until, scale=scale, temper=temper)
    mask: mx.array | str = "causal"
    if not lower_right:
        slots = positions[:, None]
        mask = ((slots >= 0) & (slots <= until[..., None]))[:, None]
    output = mx.fast.scaled_dot_product_attention(queries, keys[:, None], values[:, None], scale=scale, mask=mask)
    own = queries if scale == dim**-0.5 else queries * (scale * dim**0.5)
    return output, attention_mass(own, keys, positions, until, None, temper)


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
    """`attend` in MLX's own primitives: one matrix of weights, used for the output and for the mass."""
    rows, groups, count, dim = queries.shape
    scale = dim**-0.5 if scale is None else scale
    heads, wide = ready(queries, keys, grows=scale > 1, scale=scale)
    heads = heads.reshape(rows, groups * count, dim)
    slots = positions[:, None]
    visible = ((slots >= 0) & (slots <= until[..., None]))[:, None]
    logits = (heads @ wide).reshape(rows, groups, count, -1)
    shares = softmax(logits, visible)
    output = shares.reshape(rows, groups * count, -1) @ values.astype(mx.float32)
    if temper is not None:
        tempered = noisy(logits / temper.tau[:, None, :, None], temper, positions, slice(None))
        shares = softmax(tempered, visible)
    mass = shares.squeeze((1, 2)) if groups == count == 1 else mx.sum(shares, axis=(1, 2)) * (1 / groups)
    return output.reshape(rows, groups, count, -1).astype(queries.dtype), mass


def attend_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    seen: mx.array,
    mass: mx.array | None,
    *,
    scale: float | None = None,
    temper: Temper | None = None,
    decay: mx.array | None = None,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`attend` for one token, then `evict_step` with the attention: two launches on a GPU.

    Args:
        queries: [N, G, 1, D] of the token that arrived last.
        keys: [N, n, D].
        values: [N, n, Dv].
        positions: [N, n] int32 of the slots, -1 = free.
        seen: [N] int32, arrivals so far.
        mass: [N, n] float32; None = 0.
        scale: see `attend`.
        temper: see `attend`.
        decay: see `evict_step`, as the others.
        counted: [N] int32.
        noise: [N, n] float32.
        tau: [N] float32.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        output [N, G, 1, Dv], mass [N, n] float32 and positions [N, n] int32 after the eviction.

    Raises:
        ValueError: more than one query, or one of noise and tau without the other.
    """
    rows, _, count, dim = queries.shape
    if count != 1:
        raise ValueError(f"attend_step takes the query of one token, got S = {count}")
    if (noise is None) != (tau is None):
        raise ValueError("noise and tau go together: give both or neither")
    backend = backend_for(backend)
    if backend == "reference" or not _fits(queries, keys, values):
        output, attention = attend(queries, keys, values, positions, scale=scale, temper=temper, backend=backend)
        stepped = evict_step(
            positions,
            seen,
            mass,
            attention,
            decay=decay,
            counted=counted,
            noise=noise,
            tau=tau,
            sink=sink,
            recent=recent,
            backend=backend,
        )
        return output, *stepped
    scale = dim**-0.5 if scale is None else scale
    parts = _parts(queries, keys, values, positions, _all_positions(rows), scale, temper, None, backend)
    made = launch(
        FINISH,
        backend,
        [*parts.inputs, seen, *evict_inputs(mass, decay, counted, noise, tau)],
        [parts.output, (positions.shape, mx.float32), (positions.shape, mx.float32), (positions.shape, mx.int32)],
        template={**parts.template, **evict_template(mass, True, decay, counted, noise, False, sink, recent)},
        groups=(rows, 1, 1),
        threads=_FINISH_LANES,
    )
    return made[0], made[2], made[3]


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
    if not _fits(queries, keys, None):
        return None
    scale = queries.shape[3] ** -0.5
    return _launched(queries, keys, None, positions, until, scale, temper, weights, backend)[1]


def _fits(queries: mx.array, keys: mx.array, values: mx.array | None) -> bool:
    _, groups, count, dim = queries.shape
    wide = 1 if values is None else values.shape[2]
    return groups * count <= _MOST_HEADS and dim <= _MOST_DIM and 0 < wide <= _MOST_DIM and queries.dtype == keys.dtype


def _launched(
    queries: mx.array,
    keys: mx.array,
    values: mx.array | None,
    positions: mx.array,
    until: mx.array,
    scale: float,
    temper: Temper | None,
    weights: mx.array | None,
    backend: str,
) -> tuple[mx.array, mx.array]:
    parts = _parts(queries, keys, values, positions, until, scale, temper, weights, backend)
    made = launch(
        COMBINE,
        backend,
        parts.inputs,
        [parts.output, (positions.shape, mx.float32)],
        template=parts.template,
        groups=(positions.shape[0], 1, 1),
        threads=_FINISH_LANES,
    )
    return made[0], made[1]


class _Parts(NamedTuple):
    """What the second launch takes."""

    inputs: list[mx.array]
    output: Output
    template: dict[str, int | bool | mx.Dtype]


def _parts(
    queries: mx.array,
    keys: mx.array,
    values: mx.array | None,
    positions: mx.array,
    until: mx.array,
    scale: float,
    temper: Temper | None,
    weights: mx.array | None,
    backend: str,
) -> _Parts:
    rows, groups, count, dim = queries.shape
    length, heads = positions.shape[1], groups * count
    wide = 1 if values is None else values.shape[2]
    together = 1
    while together < min(heads, 8 if max(dim, wide) <= 128 else 4):
        together *= 2
    chunks = -(-heads // together)
    parts = max(1, min(_MOST_PARTS, -(-_GROUPS // (rows * chunks)), -(-length // _LEAST_SLOTS)))
    none, heat, names = absent(mx.float32), absent(mx.float32), absent(mx.uint32)
    if temper is not None:
        heat = temper.tau
        if temper.names is not None:
            names = temper.names.reshape(rows, heads).view(mx.uint32)
    template: dict[str, int | bool | mx.Dtype] = {
        "T": queries.dtype,
        "DV": wide,
        "VALUED": values is not None,
        "TEMPERED": temper is not None,
        "NOISY": names.size > 1,
    }
    made = launch(
        KERNEL,
        backend,
        [
            queries.reshape(rows, heads, dim),
            keys,
            absent(keys.dtype) if values is None else values,
            positions,
            until,
            constant(scale),
            heat,
            names,
        ],
        [
            ((rows, heads, length), mx.float32),
            ((rows, parts, heads, 4), mx.float32),
            ((1,) if values is None else (rows, parts, heads, wide), mx.float32),
        ],
        template={**template, "D": dim, "HEADS": together},
        groups=(rows, parts, chunks),
        threads=_LANES,
    )
    return _Parts(
        [*made, positions, until, heat, names, none if weights is None else weights],
        ((1,) if values is None else (rows, groups, count, wide), queries.dtype),
        {**template, "WEIGHTED": weights is not None},
    )


@lru_cache(maxsize=64)
def _all_positions(rows: int) -> mx.array:
    """[rows, 1] int32: a query that sees every live slot."""
    return mx.array([[_EVERY_POSITION]] * rows, mx.int32)
