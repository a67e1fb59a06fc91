"""Where a kept key is seen by the queries that come later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from veloxfn.base import Slots

__all__ = ["Absolute", "seen_keys"]


@dataclass(frozen=True)
class Absolute:
    """Survivors keep the position and the rotation they arrived with; the model's offset is the tokens seen."""


def seen_keys(placement: Absolute, slots: Slots) -> mx.array:
    """Keys [N, n, D] of the slots as queries see them."""
    length = slots.positions.shape[1]
    return slots.keys if length == slots.keys.shape[1] else slots.keys[:, :length]
