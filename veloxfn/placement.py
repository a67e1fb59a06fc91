"""Where a kept key is seen by the queries that come later."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Absolute"]


@dataclass(frozen=True)
class Absolute:
    """Survivors keep the position and the rotation they arrived with; the model's offset is the tokens seen."""
