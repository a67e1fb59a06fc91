"""Column mass of a block's attention, without its matrix.

    mass_j = sum_t weight_t mean_g softmax_j(q_gt . k_j / sqrt(D))                      over the slots visible to t
    mass_j = sum_t weight_t mean_g softmax_j((q_gt . k_j / sqrt(D) + zeta_gtj) / tau_t)      tempered, with noise

The block is worked through in tiles of queries, each over the slots that its last query can see, so memory and graph
stay bounded. Products, weights and sums are float32 whatever the keys are. On a GPU the products are MLX's, and one
kernel reads each tile of them once; MLX multiplies float32 as TF32 there unless MLX_ENABLE_TF32=0, which loses nothing
of float16 and bfloat16 keys and queries: they fit, and are scaled after.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.constants import Schedule, bits, constant
from veloxfn.ops.fusion import fused, on_gpu
from veloxfn.ops.launch import Kernel, backend_for, launch
from veloxfn.ops.noise import hashed_gumbel
from veloxfn.ops.weights import exponentials, ready, softmax

__all__ = ["KERNEL", "Recipe", "Temper", "attention_mass", "noisy", "reference"]

# Attention weights of one tile, in elements of 4 bytes: what stays in a CPU's cache, what fills a GPU.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**20, 2**22
_TILE_QUERIES = 32  # at least: fewer would make a long block's graph large


_LANES = 512
KERNEL = Kernel(
    "mass_block",
    ("products", "positions", "until", "first", "weights", "heat", "names", "mass"),
    ("mass_out",),
    most=_LANES,
)
_KERNEL_ELEMENTS = 2**26  # products of one tile
_MOST_SLOTS = 32 * _LANES
_STRIPS = 528  # threadgroups that fill a large GPU
_FEW_QUERIES = 32  # query heads times queries that one pass over the keys takes


class Recipe(NamedTuple):
    """What the temperature and the names of the newest token's queries come from: a kernel makes them itself."""

    seen: mx.array  # [N] int32: the token is at seen - 1
    schedule: Schedule  # of the temperature
    seed: int | None  # names(seed, stream, head, seen - 1); None = no noise
    streams: mx.array  # [N] uint32


class Temper(NamedTuple):
    """What is done to the logits before their softmax."""

    tau: mx.array  # [N, S] float32 > 0, what each query's logits are divided by
    names: mx.array | None = None  # [N, G, S] uint64: Gumbel noise of (name, position of the slot) is added before
    recipe: Recipe | None = None  # of both, where S = 1 and the query is that of the newest token


def attention_mass(
    queries: mx.array,
    keys: mx.array,
    positions: mx.array,
    until: mx.array,
    weights: mx.array | None = None,
    temper: Temper | None = None,
    *,
    backend: str | None = None,
) -> mx.array:
    """Attention that every slot receives from a block of queries.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others.

    Args:
        queries: [N, G, S, D].
        keys: [N, n, D].
        positions: [N, n] int32 of the slots, -1 = free. Slot n - S + t may be visible to the queries t .. S-1 only.
        until: [N, S] int32: query t sees the live slots at positions up to until[t]; one that sees none counts nothing.
        weights: [N, S] float32 of the queries, not negative; None = 1.
        temper: temperature and noise of the logits; None = plain softmax.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        [N, n] float32.
    """
    tempering = (None, None) if temper is None else (temper.tau, temper.names)
    checks.attention(queries, keys, None, positions, until, *tempering)
    checks.operand("weights", weights, "[N, S]", (queries.shape[0], queries.shape[2]), mx.float32)
    backend = backend_for(backend)
    if backend != "reference":
        from veloxfn.ops.attend import visible_mass

        few = queries.shape[1] * queries.shape[2] <= _FEW_QUERIES
        mass = visible_mass(queries, keys, positions, until, weights, temper, backend) if few else None
        if mass is not None:
            return mass
        if keys.shape[1] <= _MOST_SLOTS:
            return _launched(queries, keys, positions, until, weights, temper, backend)
    return _by_tiles(queries, keys, positions, until, weights, temper)


def _launched(
    queries: mx.array,
    keys: mx.array,
    positions: mx.array,
    until: mx.array,
    weights: mx.array | None,
    temper: Temper | None,
    backend: str,
) -> mx.array:
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    heads, wide = queries.astype(mx.float32), keys.astype(mx.float32)
    heat = None if temper is None else temper.tau
    names = None if temper is None or temper.names is None else temper.names.view(mx.uint32)
    template: dict[str, int | bool | mx.Dtype] = {
        "SCALE": bits(dim**-0.5),
        "TEMPERED": heat is not None,
        "NOISY": names is not None,
        "WEIGHTED": weights is not None,
    }
    tile = max(_TILE_QUERIES, _KERNEL_ELEMENTS // (rows * groups * length))
    strips = max(1, min(-(-_STRIPS // rows), groups * min(tile, count) // 4))
    mass = None
    for start in range(0, count, tile):
        some = min(tile, count - start)
        seen = length - count + start + some  # slots behind this are later than the tile
        part = heads[:, :, start : start + some]
        if mass is not None:
            part = mx.depends([part], [mass])[0]  # one tile in memory at a time
        transposed = wide[:, None, :seen].swapaxes(2, 3)
        products = part @ transposed if groups > 1 else (part[:, 0] @ transposed[:, 0])[:, None]
        mass = launch(
            KERNEL,
            backend,
            [products, positions, until, constant(start, shape=(4,), dtype=mx.int32), weights, heat, names, mass],
            [((rows, strips, length), mx.float32)],
            template={**template, **_slots(seen), "BEGUN": mass is not None},
            groups=(strips, rows, 1),
            threads=_LANES,
        )[0]
    return mx.sum(cast(mx.array, mass), axis=1)


def _slots(seen: int) -> dict[str, int | bool | mx.Dtype]:
    """Slots of a lane, and queries at once: as its registers allow, few kernels for many lengths, few idle lanes."""
    slots = -(-seen // _LANES)
    step = 1 if slots <= 8 else 2 if slots <= 16 else 4
    slots = -(-slots // step) * step
    return {"C": slots, "Q": 2 if slots <= 8 else 1}


def _by_tiles(
    queries: mx.array,
    keys: mx.array,
    positions: mx.array,
    until: mx.array,
    weights: mx.array | None,
    temper: Temper | None,
) -> mx.array:
    rows, groups, count, dim = queries.shape
    length = keys.shape[1]
    queries, wide = ready(queries, keys, grows=temper is not None)
    if temper is not None:
        queries = queries / temper.tau[:, None, :, None]
    if count == 1 and weights is None:
        logits = noisy((queries @ wide[:, None]), temper, positions, slice(None)).squeeze(2)
        return _of_one_token(logits, positions, until)
    weights = mx.ones((rows, count), mx.float32) if weights is None else weights
    tile = max(_TILE_QUERIES, (_GPU_ELEMENTS if on_gpu() else _CPU_ELEMENTS) // (rows * groups * length))
    mass = mx.zeros((rows, length), mx.float32)
    for start in range(0, count, tile):
        now = slice(start, min(start + tile, count))
        seen = length - count + now.stop  # slots behind this are later than the tile
        heads, limit = queries[:, :, now], until[:, now, None]
        if start:
            heads, limit = mx.depends([heads, limit], [mass])  # one tile in memory at a time
        logits = heads.reshape(rows, groups * heads.shape[2], dim) @ wide[:, :, :seen]
        slots = positions[:, :seen]
        part = _of_tile(
            noisy(logits.reshape(rows, groups, heads.shape[2], seen), temper, slots, now),
            mx.logical_and(slots[:, None] >= 0, slots[:, None] <= limit),
            weights[:, now] / groups,
        )
        mass = mass + (part if seen == length else mx.pad(part, [(0, 0), (0, length - seen)]))
    return mass


def reference(
    queries: mx.array,
    keys: mx.array,
    positions: mx.array,
    until: mx.array,
    weights: mx.array | None = None,
    temper: Temper | None = None,
) -> mx.array:
    """`attention_mass` by its definition: the whole [N, G, S, n] matrix, finite keys only."""
    logits = queries.astype(mx.float32) @ keys.astype(mx.float32)[:, None].swapaxes(2, 3) * queries.shape[3] ** -0.5
    if temper is not None:
        if temper.names is not None:
            logits = logits + hashed_gumbel(temper.names[..., None], positions[:, None, None])
        logits = logits / temper.tau[:, None, :, None]
    slots = positions[:, None, :]
    visible = mx.logical_and(slots >= 0, slots <= until[:, :, None])[:, None]
    shares = mx.where(visible, mx.softmax(mx.where(visible, logits, mx.finfo(mx.float32).min), axis=-1), 0)
    each = shares.mean(axis=1)
    return (each if weights is None else each * weights[:, :, None]).sum(axis=1)


def noisy(logits: mx.array, temper: Temper | None, positions: mx.array, now: slice) -> mx.array:
    """Tempered logits [N, G, T, n] of the queries `now`, with the noise that `temper` asks for."""
    if temper is None or temper.names is None:
        return logits
    noise = hashed_gumbel(temper.names[:, :, now, None], positions[:, None, None])
    return logits + noise / temper.tau[:, None, now, None]


def _of_one_token(logits: mx.array, positions: mx.array, until: mx.array) -> mx.array:
    """Mean over G of softmax(logits [N, G, n]) over the slots that one query per row sees: [N, n]."""
    live = mx.logical_and(positions >= 0, positions <= until)
    if logits.shape[1] == 1:  # in [N, n] alone all of it fuses
        return softmax(logits.squeeze(1), live)
    return mx.sum(softmax(logits, live[:, None], 1 / logits.shape[1]), axis=1)


@fused
def _of_tile(logits: mx.array, visible: mx.array, weights: mx.array) -> mx.array:
    """Weighted column sums [N, n] of softmax(logits [N, G, T, n]) over the visible [N, T, n] slots."""
    rows, groups, count, length = logits.shape
    powers = exponentials(logits, visible[:, None])
    total = powers @ mx.ones((length, 1))  # faster than a sum
    scale = mx.where(total > 0, weights[:, None, :, None] / total, 0)
    spread = scale.reshape(rows, 1, groups * count)
    return (spread @ powers.reshape(rows, groups * count, length)).reshape(rows, length)
