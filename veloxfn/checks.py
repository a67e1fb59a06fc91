"""Clear errors for bad settings: each names the value and the rule it breaks."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["choice", "flag", "instance", "integer", "number", "window"]


def integer(name: str, value: object, *, low: int) -> None:
    """Raise unless `value` is an int (not a bool) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value}")


def flag(name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {value!r}")


def instance(name: str, value: object, kind: type) -> None:
    """Raise unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, got {value!r} ({type(value).__name__})")


def window(budget: int, sink: int, recent: int) -> None:
    """Raise unless at least one row of the budget stays evictable."""
    if sink + recent >= budget:
        raise ValueError(
            f"sink + recent must be < budget, so that one slot stays evictable; "
            f"got sink={sink} + recent={recent} = {sink + recent}, budget={budget}"
        )
