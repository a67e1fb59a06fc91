"""S steps of one token each, an eviction after every one, in a single launch.

For every token t that counts, in order:

    the lowest free slot takes k_t and v_t;  its mass is 0
    a_j = mean_g softmax_j(q_gt . k_j / sqrt(D))                       over the live slots
    mass_j <- decay * mass_j + a_j                                     or a_j alone, where no mass is kept
    importance_j = mass_j  [/ (seen - position_j)]  [+ tau_t * noise_j]
    more than `budget` are live: the weakest slot is freed

With a temper the logits are (q_gt . k_j / sqrt(D) + zeta_gtj) / tau_t. These are H2O, TOVA and Keyformer, cadence
"token". On a GPU one threadgroup does all steps of a row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.attention_mass import Temper, attention_mass
from veloxfn.ops.constants import numbers
from veloxfn.ops.evict_step import reference as evict_step
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch

__all__ = ["KERNEL", "Folded", "Noise", "fits", "fold_tokens", "reference"]

KERNEL = Kernel(
    "fold_tokens",
    (
        "keys",
        "values",
        "positions",
        "mass",
        "noise",
        "seen",
        "fresh_keys",
        "fresh_values",
        "queries",
        "valid",
        "tau",
        "names",
        "drawn",
        "limits",
        "rates",
    ),
    ("keys_out", "values_out", "positions_out", "mass_out", "noise_out"),
    most=None,
)

# Of a threadgroup, at most. A GPU has 65536 registers for it, given to four SIMD groups at a time: 96 for each of 640
# lanes, 128 of 512, 168 of 384, and the 255 that exist of 256.
_LANES = 640
# Words of the keys that a lane may hold until the last token, beside the 50 to 100 registers that it works with, by
# lanes. Of an NVIDIA GPU: an Apple one has fewer registers, and which keys fit has not been measured there.
_HELD = {384: 96, 256: 160}
_MOST_SLOTS = 8192
_THREADGROUP_BYTES = 32 * 1024


class Noise(NamedTuple):
    """One draw per token, added `tau` times to its importance."""

    tau: mx.array  # [N, S] float32, at each arrival
    kept: mx.array  # [N, n] float32, of the slots
    drawn: mx.array  # [N, S] float32, of the arrivals


class Folded(NamedTuple):
    """The slots after the last token."""

    keys: mx.array  # [N, C, D], C = budget + 1
    values: mx.array  # [N, C, Dv]
    positions: mx.array  # [N, n'] int32, n' = min(n + S, C)
    mass: mx.array | None  # [N, n'] float32
    noise: mx.array | None  # [N, n'] float32


def fold_tokens(
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    seen: mx.array,
    fresh_keys: mx.array,
    fresh_values: mx.array,
    queries: mx.array | None,
    *,
    budget: int,
    sink: int,
    recent: int,
    mass: mx.array | None = None,
    decay: float = 1.0,
    age_normalised: bool = False,
    temper: Temper | None = None,
    noise: Noise | None = None,
    valid: mx.array | None = None,
    backend: str | None = None,
) -> Folded:
    """Absorb and evict S tokens one by one.

    A slot whose product with a query is not finite gets nothing from it and takes nothing from the others.

    Args:
        keys: [N, C', D] buffer, C' >= n; rows from n on are free. On CUDA keys begin at a multiple of 16 bytes, as all
            that MLX makes does and slices of it by row.
        values: [N, C', Dv].
        positions: [N, n] int32 of the slots, -1 = free; n <= budget + 1, and at most `budget` are live.
        seen: [N] int32, arrivals before the block.
        fresh_keys: [N, S, D] of the arrivals, in the dtype of `keys`.
        fresh_values: [N, S, Dv].
        queries: [N, G, S, D]; None = the arriving keys act as queries over the slots before them.
        budget: live slots of a row after each step.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        mass: [N, n] float32; None = ranked by the attention of each query alone.
        decay: what a query keeps of the mass before it.
        age_normalised: rank by mass per query that has seen the slot.
        temper: temperature and noise of the logits.
        noise: noise of the importance.
        valid: [N, S] bool, False = padded: not stored, not counted, and its query does not count; None = all valid.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        The slots after the last token; `seen` grows by the tokens that count.

    Raises:
        ValueError: a wrong shape, or a kernel was asked for that does not fit the shapes (see `fits`). With
            backend=None such shapes are computed by the reference.
    """
    checks.slot_columns(positions, seen, mass=mass)
    rows, length = positions.shape
    checks.array("keys", keys, "[N, C, D]", (rows, None, None))
    size, dim = keys.shape[1:]
    checks.array("values", values, "[N, C, Dv]", (rows, size, None))
    checks.array("fresh_keys", fresh_keys, "[N, S, D]", (rows, None, dim))
    count, value_dim = fresh_keys.shape[1], values.shape[2]
    checks.array("fresh_values", fresh_values, "[N, S, Dv]", (rows, count, value_dim))
    if queries is not None:
        checks.array("queries", queries, "[N, G, S, D]", (rows, None, count, dim))
    kinds = {"values": values, "fresh_keys": fresh_keys, "fresh_values": fresh_values}
    for name, buffer in kinds.items():
        if buffer.dtype != keys.dtype:
            raise TypeError(f"{name} must be {keys.dtype}, as keys are, got {buffer.dtype}")
    checks.operand("valid", valid, "[N, S]", (rows, count), mx.bool_)
    if length > min(budget + 1, size):
        raise ValueError(f"n must be at most C and budget + 1, got n={length}, C={size}, budget={budget}")
    heads = 1 if queries is None else queries.shape[1]
    fitting = fits(budget, dim, heads)
    if backend is not None and backend != "reference" and not fitting:
        raise ValueError(f"fold_tokens has no kernel for budget={budget}, D={dim}, G={heads}")
    backend = backend_for(backend)
    after = min(length + count, budget + 1)

    def room(column: mx.array, value: int = 0) -> mx.array:
        if length == 0:  # CUDA computes nothing from an empty array
            return mx.full((rows, after), value, column.dtype)
        return column if after == length else mx.pad(column, [(0, 0), (0, after - length)], constant_values=value)

    positions = room(positions, -1)
    mass = None if mass is None else room(mass)
    noise = None if noise is None else noise._replace(kept=room(noise.kept))
    if 0 in (rows, heads, count, dim) or backend == "reference" or not fitting:
        return reference(
            keys,
            values,
            positions,
            seen,
            fresh_keys,
            fresh_values,
            queries,
            budget=budget,
            sink=sink,
            recent=recent,
            mass=mass,
            decay=decay,
            age_normalised=age_normalised,
            temper=temper,
            noise=noise,
            valid=valid,
        )
    capacity, (lanes, held) = budget + 1, _shape(budget, dim, heads, keys.dtype.size, backend)
    tau = noise.tau if noise is not None else temper.tau if temper is not None else None
    names = None if temper is None else temper.names
    asked = fresh_keys if queries is None else queries
    columns = (positions.shape, mx.float32)
    made = launch(
        KERNEL,
        backend,
        [
            keys if size else None,
            values if size and value_dim else None,
            positions,
            mass,
            None if noise is None else noise.kept,
            seen,
            fresh_keys,
            fresh_values if value_dim else None,
            asked,
            valid,
            tau,
            None if names is None else names.view(mx.uint32),
            None if noise is None else noise.drawn,
            _integers(budget, sink, recent, size),
            _floats(decay, dim**-0.5, 0.0, 0.0),  # 16 bytes: see `veloxfn.ops.noise.halves`
        ],
        [
            ((rows, capacity, dim), keys.dtype),
            ((rows, capacity, value_dim), values.dtype) if value_dim else None,
            (positions.shape, mx.int32),
            None if mass is None else columns,
            None if noise is None else columns,
        ],
        template={
            "T": keys.dtype,
            "Q": asked.dtype,
            "D": dim,
            "DV": value_dim,
            "HEADS": heads,
            "WIDTH": _width(dim, keys.dtype.size),
            "GROUPS": lanes // 32,
            "SLOTS": -(-capacity // lanes),
            "HELD": held,
            "MASSIVE": mass is not None,
            "DECAYS": decay != 1.0,
            "AGED": age_normalised,
            "OWN": queries is not None,
            "TEMPERED": temper is not None,
            "NAMED": names is not None,
            "NOISY": noise is not None,
            "PADDED": valid is not None,
        },
        groups=(rows, 1, 1),
        threads=lanes,
    )
    outputs = iter(made)
    return Folded(
        next(outputs),
        next(outputs) if value_dim else mx.zeros((rows, capacity, 0), values.dtype),
        next(outputs),
        None if mass is None else next(outputs),
        None if noise is None else next(outputs),
    )


def fits(budget: int, dim: int, heads: int) -> bool:
    """Whether a kernel takes a budget, D and G: 8192 slots, and queries of two tokens in threadgroup memory."""
    groups = _LANES // 32
    used = 8 * dim * (heads + 1) + 8 * heads * groups + 384
    return budget < _MOST_SLOTS and used <= _THREADGROUP_BYTES


def reference(
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    seen: mx.array,
    fresh_keys: mx.array,
    fresh_values: mx.array,
    queries: mx.array | None,
    *,
    budget: int,
    sink: int,
    recent: int,
    mass: mx.array | None = None,
    decay: float = 1.0,
    age_normalised: bool = False,
    temper: Temper | None = None,
    noise: Noise | None = None,
    valid: mx.array | None = None,
) -> Folded:
    """`fold_tokens` in MLX's own primitives, over slots that have room: n = n'."""
    (rows, length), count = positions.shape, fresh_keys.shape[1]
    keys, values = (_resized(buffer, budget + 1) for buffer in (keys, values))
    kept = None if noise is None else noise.kept
    stores = 0 not in values.shape
    for t in range(count if rows else 0):
        now = slice(t, t + 1)
        ok = mx.ones((rows, 1), mx.bool_) if valid is None else valid[:, now]
        given = mx.logical_and(numbers(length) == mx.argmin(positions, axis=1, keepdims=True), ok)
        row = mx.pad(given, [(0, 0), (0, budget + 1 - length)])[..., None]
        keys = mx.where(row, fresh_keys[:, now], keys)
        values = mx.where(row, fresh_values[:, now], values) if stores else values
        positions = mx.where(given, seen[:, None], positions)
        until = mx.where(ok, seen[:, None] if queries is not None else mx.maximum(seen[:, None] - 1, 0), -1)
        attention = attention_mass(
            fresh_keys[:, None, now] if queries is None else queries[:, :, now],
            keys[:, :length],
            positions,
            until,
            None,
            None if temper is None else _of_token(temper, now),
        )
        seen = seen + ok.squeeze(1).astype(mx.int32)
        before = attention if mass is None else mx.where(given, 0, mass)
        kept = kept if noise is None or kept is None else mx.where(given, noise.drawn[:, now], kept)
        heavy, freed = evict_step(
            positions,
            seen,
            None if mass is None else before,
            attention,
            arrived=mx.where(ok, 0, -1),
            decay=decay,
            counted=None if not age_normalised else seen - (queries is None),
            noise=kept,
            tau=None if noise is None else noise.tau[:, t],
            sink=sink,
            recent=recent,
        )
        mass = None if mass is None else heavy
        positions = freed if length == budget + 1 else positions
    return Folded(keys, values, positions, mass, kept)


def _of_token(temper: Temper, now: slice) -> Temper:
    return Temper(temper.tau[:, now], None if temper.names is None else temper.names[..., now])


def _resized(buffer: mx.array, size: int) -> mx.array:
    """The first `size` rows of a buffer [N, C', D], zeros where there are fewer."""
    rows, held, dim = buffer.shape
    if 0 in buffer.shape:
        return mx.zeros((rows, size, dim), buffer.dtype)
    missing = size - held
    return buffer[:, :size] if missing <= 0 else mx.pad(buffer, [(0, 0), (0, missing), (0, 0)])


def _shape(budget: int, dim: int, heads: int, size: int, backend: str) -> tuple[int, int]:
    """Threads of a threadgroup, and the turns of 16 slots whose keys its SIMD groups hold in registers, 0 = none."""
    width = _width(dim, size)
    vectors = -(-dim // (8 * width))
    for most, words in _HELD.items() if backend != "metal" else ():
        lanes = min(_LANES, most, 32 * -(-(budget + 1) // 16))
        turns = -(-(budget + 1) // (lanes // 2))
        if turns * vectors * max(width * size, 4) <= words:
            return lanes, turns
    # Else as many as registers allow, so that many loads are under way.
    if heads > 1 or vectors > 4:
        most = 256
    elif vectors == 4:
        most = 384
    else:
        most = 640 if budget < 640 else 512
    return min(_LANES, most, lanes_for(budget + 1)), 0


def _width(dim: int, size: int) -> int:
    """Elements of one load, 16 bytes at most: 8 lanes share a key, so that all have work where D allows it."""
    widths = [w for w in (8, 4, 2, 1) if w * size <= 16]
    return next((w for w in widths if dim % (8 * w) == 0), next(w for w in widths if dim % w == 0))


@cache
def _integers(*given: int) -> mx.array:
    return mx.array(given, mx.int32)


@cache
def _floats(*given: float) -> mx.array:
    return mx.array(given, mx.float32)
