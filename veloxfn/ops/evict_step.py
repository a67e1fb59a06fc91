"""The step of a method that ranks by mass: the masses with one query's attention, then the slot that loses.

    mass_j <- decay * mass_j + attention_j
    importance_j = mass_j  [/ max(counted - position_j, 1)]  [+ tau * noise_j]

It is the step of H2O (plain, decaying, age-normalised), of Keyformer (additive noise; noise on logits is already in the
attention), of TOVA (no mass) and, with `keep_low`, of K-norm, whose mass is the norm.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.constants import NO_SCHEDULE, Schedule, bits, constant, numbers
from veloxfn.ops.launch import MOST_SPREAD, Body, Kernel, Output, Template, backend_for, launch, spread_over
from veloxfn.ops.weakest import reference as weakest

__all__ = [
    "COMBINE",
    "FINISH",
    "JOINING",
    "KERNEL",
    "NO_PARTS",
    "UNIT",
    "Parts",
    "Rule",
    "combine",
    "evict_step",
    "importance_of",
    "kept_by",
    "reference",
    "stepped",
    "updated_mass",
]

KERNEL = Kernel(
    "evict_step",
    ("positions", "seen", "mass", "attention", "arrived", "counted", "noise", "tau", "scratch", "weights"),
    ("mass_out", "positions_out", "output"),
    most=MOST_SPREAD,
    alone=True,
)
# The same behind the first launch of `attend`, whose parts it joins: with an eviction, and without one.
FINISH = KERNEL._replace(name="attend_finish", bodies=(Body("evict_step"),))
COMBINE = KERNEL._replace(name="attend_combine", bodies=(Body("evict_step"),))

UNIT = 128  # slots: a part has so many, or a multiple
JOINING = 256  # threads that join parts, at least


class Parts(NamedTuple):
    """What the first launch of `attend` made of the parts of a row."""

    scratch: mx.array  # [N, parts, ..] float32
    weights: mx.array | None  # [N, S] float32 of the queries
    output: Output | None  # what is asked for
    attended: bool  # whether the mass is asked for
    template: Template


class Rule(NamedTuple):
    """How masses change and what slots are ranked by: arguments as for `evict_step`."""

    arrived: mx.array | None
    decay: float
    counted: mx.array | None
    noise: mx.array | None
    tau: mx.array | None
    schedule: Schedule | None
    keep_low: bool
    sink: int
    recent: int

    def check(
        self, positions: mx.array, seen: mx.array, mass: mx.array | None, attention: mx.array | None = None
    ) -> None:
        """Raise unless all arrays have their shapes and types, and noise and tau come together."""
        checks.slot_columns(positions, seen, mass=mass, attention=attention, noise=self.noise)
        rows = positions.shape[0]
        checks.operand("arrived", self.arrived, "[N, 1]", (rows, 1), mx.int32)
        checks.operand("counted", self.counted, "[N]", (rows,), mx.int32)
        checks.operand("tau", self.tau, "[N]", (rows,), mx.float32)
        if (self.noise is None) != (self.tau is None):
            raise ValueError("noise and tau go together: give both or neither")

    def template(self, *, massive: bool, attended: bool, stores: bool) -> Template:
        """The kernel's constants, but for the schedule: whether there are masses, attention, masses to be stored."""
        decays = self.decay != 1.0
        return {
            "RANKS": True,
            "STORES": stores,
            "MASSIVE": massive,
            "ATTENDED": attended,
            "DECAYS": decays,
            "DECAY": bits(self.decay),
            "GUARDED_DECAY": decays and self.arrived is not None,
            "AGED": self.counted is not None,
            "DRAWN": self.noise is not None,
            "SCHEDULED": self.schedule is not None,
            "KEEP_LOW": self.keep_low,
            "SINK": self.sink,
            "RECENT": self.recent,
        }


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
    rule = Rule(arrived, decay, counted, noise, tau, schedule, keep_low, sink, recent)
    rule.check(positions, seen, mass, attention)
    after, left, _ = stepped(positions, seen, mass, attention, rule, backend_for(backend))
    return after, left


def stepped(
    positions: mx.array,
    seen: mx.array,
    mass: mx.array | None,
    attention: mx.array | None,
    rule: Rule,
    backend: str,
    parts: Parts | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """`evict_step` without its checks: masses, positions, and of `parts`, which then give the attention, the output."""
    if backend == "reference":
        options = rule._asdict()
        del options["schedule"]  # tau has its value
        return *reference(positions, seen, mass, attention, **options), None
    attended = attention is not None if parts is None else parts.attended
    decays = rule.decay != 1.0
    stores = attended or (decays and mass is not None)
    lanes, slots = spread_over(positions.shape[1])
    made = iter(
        launch(
            KERNEL if parts is None else FINISH,
            backend,
            [
                positions,
                seen,
                mass,
                attention,
                rule.arrived if decays else None,
                rule.counted,
                rule.noise,
                None if rule.schedule is not None else rule.tau,
                *((None, None) if parts is None else (parts.scratch, parts.weights)),
            ],
            [
                (positions.shape, mx.float32) if stores else None,
                (positions.shape, mx.int32),
                None if parts is None else parts.output,
            ],
            template={
                **(NO_PARTS if parts is None else parts.template),
                **(rule.schedule or NO_SCHEDULE).template,
                **rule.template(massive=mass is not None, attended=attended, stores=stores),
                "SLOTS": slots,
            },
            groups=(positions.shape[0], 1, 1),
            threads=lanes if parts is None else max(lanes, JOINING),
        )
    )
    if stores:
        mass = next(made)
    left = next(made)
    return mx.zeros(positions.shape, mx.float32) if mass is None else mass, left, next(made, None)


def combine(parts: Parts, positions: mx.array, backend: str) -> tuple[mx.array | None, mx.array]:
    """Output, where it is asked for, and attention [N, n] of the parts of the slots: the launch without an eviction."""
    lanes, slots = spread_over(positions.shape[1])
    attention, *output = launch(
        COMBINE,
        backend,
        [positions, *[None] * 7, parts.scratch, parts.weights],
        [(positions.shape, mx.float32), None, parts.output],
        template={
            **NO_SCHEDULE.template,
            **parts.template,
            **dict.fromkeys(("MASSIVE", "DECAYS", "GUARDED_DECAY", "AGED", "DRAWN", "SCHEDULED", "KEEP_LOW"), False),
            **dict.fromkeys(("DECAY", "SINK", "RECENT"), 0),
            "SLOTS": slots,
            "RANKS": False,
            "STORES": True,
            "ATTENDED": True,
        },
        groups=(positions.shape[0], 1, 1),
        threads=max(lanes, JOINING),
    )
    return (output[0] if output else None), attention


NO_PARTS: Template = {
    "JOINS": False,
    "T": mx.float32,
    "DV": 1,
    "ALL": 1,
    "COUNT": 1,
    "UNIT": UNIT,
    "VALUED": False,
    "WEIGHTED": False,
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
