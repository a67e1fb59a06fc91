"""Attention of a few queries and what each slot receives from it, in one pass over keys and values.

    A[h, j] = softmax_j(scale q_h . k_j)                               over the slots visible to the query
    output_h = sum_j A[h, j] v_j
    mass_j = sum_t mean_g A[g t, j]                                    or of the tempered softmax, for the mass alone

On a GPU two launches, whatever the number of slots: parts of a row, each by a threadgroup of its own, then their sum.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from veloxfn.ops.attention_mass import Temper, attention_mass, noisy
from veloxfn.ops.launch import Kernel, Output, absent, backend_for, constant, launch
from veloxfn.ops.weights import ready, softmax

__all__ = ["COMBINE", "KERNEL", "attend", "reference", "visible_mass"]

KERNEL = Kernel(
    "attend",
    ("queries", "keys", "values", "positions", "until", "scale", "tau", "names"),
    ("logits", "tops", "sums", "partial", "tempered_tops", "tempered_sums"),
)
COMBINE = Kernel(
    "attend_combine",
    (
        "logits",
        "tops",
        "sums",
        "partial",
        "tempered_tops",
        "tempered_sums",
        "positions",
        "until",
        "tau",
        "names",
        "weights",
    ),
    ("output", "mass"),
)

_LANES = 256
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
    rows, groups, count, dim = queries.shape
    length, heads = positions.shape[1], groups * count
    wide = 1 if values is None else values.shape[2]
    together = 1
    while together < min(heads, 8 if max(dim, wide) <= 128 else 4):
        together *= 2
    chunks = -(-heads // together)
    parts = max(1, min(_MOST_PARTS, -(-_GROUPS // (rows * chunks)), -(-length // _LEAST_SLOTS)))
    none = absent(mx.float32)
    tau = none if temper is None else temper.tau
    names = absent(mx.uint32)
    if temper is not None and temper.names is not None:
        names = temper.names.reshape(rows, heads).view(mx.uint32)
    valued, tempered, noisy_logits = values is not None, temper is not None, names.size > 1
    each: Output = ((rows, parts, heads), mx.float32)
    nothing: Output = ((1,), mx.float32)
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
            tau,
            names,
        ],
        [
            ((rows, heads, length), mx.float32),
            each,
            each,
            ((rows, parts, heads, wide), mx.float32) if valued else nothing,
            each if tempered else nothing,
            each if tempered else nothing,
        ],
        template={
            "T": queries.dtype,
            "D": dim,
            "DV": wide,
            "HEADS": together,
            "VALUED": valued,
            "TEMPERED": tempered,
            "NOISY": noisy_logits,
        },
        groups=(rows, parts, chunks),
        threads=_LANES,
    )
    output, mass = launch(
        COMBINE,
        backend,
        [*made, positions, until, tau, names, none if weights is None else weights],
        [((rows, groups, count, wide) if valued else (1,), queries.dtype), ((rows, length), mx.float32)],
        template={
            "T": queries.dtype,
            "DV": wide,
            "VALUED": valued,
            "TEMPERED": tempered,
            "NOISY": noisy_logits,
            "WEIGHTED": weights is not None,
        },
        groups=(rows, -(-length // _LANES), 1),
        threads=_LANES,
    )
    return output, mass


@lru_cache(maxsize=64)
def _all_positions(rows: int) -> mx.array:
    """[rows, 1] int32: a query that sees every live slot."""
    return mx.array([[_EVERY_POSITION]] * rows, mx.int32)
