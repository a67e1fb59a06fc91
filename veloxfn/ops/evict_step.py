"""The step of a method that ranks by mass: the masses with one query's attention, then the slot that loses.

    mass_j <- decay * mass_j + attention_j
    importance_j = mass_j  [/ max(counted - position_j, 1)]  [+ tau * noise_j]

It is the step of H2O (plain, decaying, age-normalised), of Keyformer (additive noise; noise on logits is already in the
attention), of TOVA (no mass) and, with `keep_low`, of K-norm, whose mass is the norm.
"""

from __future__ import annotations

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.constants import NO_SCHEDULE, Schedule, bits, constant, numbers
from veloxfn.ops.launch import Kernel, backend_for, lanes_for, launch
from veloxfn.ops.weakest import reference as weakest

__all__ = [
    "KERNEL",
    "evict_inputs",
    "evict_step",
    "evict_template",
    "importance_of",
    "kept_by",
    "reference",
    "updated_mass",
]

KERNEL = Kernel(
    "evict_step",
    ("positions", "seen", "mass", "attention", "arrived", "counted", "noise", "tau"),
    ("mass_out", "positions_out"),
)


def evict_step(
    positions: mx.array,
    seen: mx.array,
    mass: mx.array | None,
    attention: mx.array | None = None,
    *,
    arrived: mx.array | None = None,
    decay: float = 1.0,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    schedule: Schedule | None = None,
    keep_low: bool = False,
    sink: int,
    recent: int,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Masses after one query, and positions after one eviction.

    Args:
        positions: [N, n] int32 of the slots, below 2**30, -1 = free.
        seen: [N] int32, arrivals so far.
        mass: [N, n] float32; None = 0.
        attention: [N, n] float32 that the slots receive; None = 0.
        arrived: [N, 1] int32, slot of the token whose query it is, -1 = padded: nothing decays; None = none is padded.
        decay: what the masses keep, in [0, 1].
        counted: [N] int32, queries that a slot at position 0 would have received attention from: ranks by mass per
            query. None ranks by mass.
        noise: [N, n] float32, added `tau` times to the importance; None = none.
        tau: [N] float32, given with `noise`.
        schedule: what `tau` is, seen - 1 queries after its start, for kernels to make it; None = as given.
        keep_low: rank by the negative instead.
        sink: first arrivals that are protected.
        recent: last arrivals that are protected.
        backend: see `veloxfn.ops.launch.backend_for`.

    Returns:
        mass [N, n] float32, and positions [N, n] int32 with -1 for the weakest slot of each row: a free one where there
        is one, so that such a row loses nothing.

    Raises:
        ValueError: a wrong shape, or one of noise and tau without the other.
        TypeError: an array of another type.
    """
    checks.slot_columns(positions, seen, mass=mass, attention=attention, noise=noise)
    check_rows(positions.shape[0], arrived, counted, tau)
    if (noise is None) != (tau is None):
        raise ValueError("noise and tau go together: give both or neither")
    backend = backend_for(backend)
    if backend == "reference":
        return reference(
            positions,
            seen,
            mass,
            attention,
            arrived=arrived,
            decay=decay,
            counted=counted,
            noise=noise,
            tau=tau,
            keep_low=keep_low,
            sink=sink,
            recent=recent,
        )
    rows, length = positions.shape
    last_mass, *others = evict_inputs(mass, arrived, decay, counted, noise, tau, schedule)
    made = launch(
        KERNEL,
        backend,
        [positions, seen, last_mass, attention, *others],
        [(positions.shape, mx.float32), (positions.shape, mx.int32)],
        template=evict_template(
            mass, attention is not None, arrived, decay, counted, noise, schedule, keep_low, sink, recent
        ),
        groups=(rows, 1, 1),
        threads=lanes_for(length),
    )
    return made[0], made[1]


def check_rows(rows: int, arrived: mx.array | None, counted: mx.array | None, tau: mx.array | None) -> None:
    """Raise unless the rows' own arguments have their shapes and types."""
    checks.operand("arrived", arrived, "[N, 1]", (rows, 1), mx.int32)
    checks.operand("counted", counted, "[N]", (rows,), mx.int32)
    checks.operand("tau", tau, "[N]", (rows,), mx.float32)


def evict_inputs(
    mass: mx.array | None,
    arrived: mx.array | None,
    decay: float,
    counted: mx.array | None,
    noise: mx.array | None,
    tau: mx.array | None,
    schedule: Schedule | None,
) -> list[mx.array | None]:
    """The kernel's inputs of these names, in this order."""
    return [mass, None if decay == 1.0 else arrived, counted, noise, None if schedule is not None else tau]


def evict_template(
    mass: mx.array | None,
    attended: bool,
    arrived: mx.array | None,
    decay: float,
    counted: mx.array | None,
    noise: mx.array | None,
    schedule: Schedule | None,
    keep_low: bool,
    sink: int,
    recent: int,
) -> dict[str, int | bool]:
    """The kernel's constants."""
    return {
        "MASSIVE": mass is not None,
        "ATTENDED": attended,
        "DECAYS": decay != 1.0,
        "DECAY": bits(decay),
        "GUARDED_DECAY": decay != 1.0 and arrived is not None,
        "AGED": counted is not None,
        "DRAWN": noise is not None,
        "SCHEDULED": schedule is not None,
        **(schedule or NO_SCHEDULE).template,
        "KEEP_LOW": keep_low,
        "SINK": sink,
        "RECENT": recent,
    }


def reference(
    positions: mx.array,
    seen: mx.array,
    mass: mx.array | None,
    attention: mx.array | None = None,
    *,
    arrived: mx.array | None = None,
    decay: float = 1.0,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    keep_low: bool = False,
    sink: int,
    recent: int,
) -> tuple[mx.array, mx.array]:
    """`evict_step` in MLX's own primitives."""
    if mass is None:
        mass = mx.zeros(positions.shape, mx.float32) if attention is None else attention
    else:
        mass = updated_mass(mass, attention, kept_by(arrived, decay))
    importance = importance_of(mass, positions, counted=counted, noise=noise, tau=tau, keep_low=keep_low)
    lost = weakest(importance, positions, seen, sink=sink, recent=recent)[:, None]
    return mass, mx.where(numbers(positions.shape[1]) == lost, -1, positions)


def kept_by(arrived: mx.array | None, decay: float) -> mx.array | None:
    """What masses keep [N] float32 over tokens in the slots `arrived` [N, S] int32, -1 = padded; None = all.

    Without `arrived`, one token of each row.
    """
    if decay == 1.0:
        return None
    if arrived is None:
        return constant(decay)
    if arrived.shape[1] == 1:
        return mx.where(arrived.squeeze(1) >= 0, mx.array(decay, mx.float32), 1.0)
    return mx.power(mx.array(decay, mx.float32), (arrived >= 0).sum(axis=1).astype(mx.float32))


def updated_mass(mass: mx.array, attention: mx.array | None, decay: mx.array | None) -> mx.array:
    """Masses [N, n] with the attention [N, n] of new queries, of the old ones the part `decay` [N]."""
    if decay is not None:
        mass = mass * decay[:, None]
    return mass if attention is None else mass + attention.astype(mx.float32)


def importance_of(
    mass: mx.array,
    positions: mx.array,
    *,
    counted: mx.array | None = None,
    noise: mx.array | None = None,
    tau: mx.array | None = None,
    keep_low: bool = False,
) -> mx.array:
    """Importance [N, n]: arguments as for `evict_step`."""
    if counted is not None:
        mass = mass / mx.maximum(counted[:, None] - positions, 1).astype(mx.float32)
    if keep_low:
        mass = -mass
    return mass if noise is None or tau is None else mass + tau[:, None] * noise
