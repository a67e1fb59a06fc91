"""Clear errors for bad settings: each names the value and the rule it breaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

if TYPE_CHECKING:
    from veloxfn.base import Slots

__all__ = [
    "SettingError",
    "array",
    "attention",
    "block",
    "choice",
    "evidence",
    "flag",
    "floating",
    "instance",
    "integer",
    "no_evidence",
    "number",
    "odd",
    "operand",
    "required",
    "slot_columns",
    "slots_of",
    "window",
]


class SettingError(ValueError):
    """A setting that a method does not have."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(setting, reason)
        self.setting = setting
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}"


def integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Raise unless `value` is an int (not a bool) of at least `low` and at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be <= {high}, got {value}")


def number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not _is_finite(value) or not low <= value <= high:
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def flag(name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")


def odd(name: str, value: object) -> None:
    """Raise unless `value` is an odd int of at least 1."""
    integer(name, value, low=1)
    if cast(int, value) % 2 == 0:
        raise ValueError(f"{name} must be odd, so that it has a middle, got {value}")


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {value!r}")


def instance(name: str, value: object, *kinds: type) -> None:
    """Raise unless `value` is one of the `kinds`."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {names}, got {value!r} ({type(value).__name__})")


def window(budget: int, sink: int, recent: int, *, name: str = "recent") -> None:
    """Raise unless at least one row of the budget stays evictable."""
    if sink + recent >= budget:
        raise ValueError(
            f"sink + {name} must be < budget, so that one slot stays evictable; "
            f"got sink={sink} + {name}={recent} = {sink + recent}, budget={budget}"
        )


def array(name: str, value: object, letters: str, shape: Sequence[int | None]) -> None:
    """Raise unless `value` is an mx.array of the shape; `letters` names it in the project's letters, None is free."""
    if not isinstance(value, mx.array):
        raise TypeError(f"{name} must be an mx.array {letters}, got {type(value).__name__}")
    fits = value.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        names = letters.strip("[]").split(", ")
        wanted = [letter if want is None else str(want) for letter, want in zip(names, shape, strict=True)]
        raise ValueError(f"{name} must be {letters} = [{', '.join(wanted)}], got {list(value.shape)}")


def operand(name: str, value: object, letters: str, shape: Sequence[int | None], *dtypes: mx.Dtype) -> None:
    """Raise unless `value` is None or an mx.array of the shape and of one of the types: kernels cannot tell."""
    if value is not None:
        required(name, value, letters, shape, *dtypes)


def required(name: str, value: object, letters: str, shape: Sequence[int | None], *dtypes: mx.Dtype) -> None:
    """`operand` that may not be None."""
    array(name, value, letters, shape)
    if cast(mx.array, value).dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {cast(mx.array, value).dtype}")


def attention(
    queries: object,
    keys: object,
    values: object,
    positions: object,
    until: object,
    tau: object = None,
    names: object = None,
) -> None:
    """Raise unless these can be attended with: the arguments of `veloxfn.ops.attend`, None = not given."""
    array("queries", queries, "[N, G, S, D]", (None, None, None, None))
    rows, groups, count, dim = cast(mx.array, queries).shape
    if not groups or not count:
        raise ValueError(f"queries must have heads and tokens, got G={groups}, S={count}")
    kinds = (mx.float32, mx.float16, mx.bfloat16)
    required("queries", queries, "[N, G, S, D]", (None, None, None, None), *kinds)
    required("keys", keys, "[N, n, D]", (rows, None, dim), *kinds)
    length = cast(mx.array, keys).shape[1]
    operand("values", values, "[N, n, Dv]", (rows, length, None), *kinds)
    required("positions", positions, "[N, n]", (rows, length), mx.int32)
    if until is None and count > length:
        raise ValueError(f"S must be at most n without until, got S={count}, n={length}")
    operand("until", until, "[N, S]", (rows, count), mx.int32)
    operand("tau", tau, "[N, S]", (rows, count), mx.float32)
    operand("names", names, "[N, G, S]", (rows, groups, count), mx.uint64)


def slots_of(positions: object) -> tuple[int, int]:
    """N and n; raise unless positions [N, n] are int32."""
    required("positions", positions, "[N, n]", (None, None), mx.int32)
    rows, length = cast(mx.array, positions).shape
    return rows, length


def slot_columns(positions: object, seen: object, **columns: object) -> None:
    """Raise unless positions [N, n] and seen [N] are int32, and the columns [N, n] float32 or None."""
    rows, length = slots_of(positions)
    required("seen", seen, "[N]", (rows,), mx.int32)
    for name, column in columns.items():
        operand(name, column, "[N, n]", (rows, length), mx.float32)


def floating(name: str, dtype: object) -> None:
    """Raise unless `dtype` is one that keys and values can have."""
    if dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {dtype}")


def block(slots: Slots, keys: object, values: object, valid: object) -> None:
    """Raise unless keys [N, S, D], values [N, S, Dv] and valid [N, S] can be absorbed into `slots`."""
    rows, _, key_dim = slots.keys.shape
    array("keys", keys, "[N, S, D]", (rows, None, key_dim))
    count = cast(mx.array, keys).shape[1]
    array("values", values, "[N, S, Dv]", (rows, count, slots.values.shape[2]))
    for name, value, dtype in (("keys", keys, slots.keys.dtype), ("values", values, slots.values.dtype)):
        if cast(mx.array, value).dtype != dtype:
            raise TypeError(f"{name} are {cast(mx.array, value).dtype}, but the state holds {dtype}")
    if valid is not None:
        array("valid", valid, "[N, S]", (rows, count))
        if cast(mx.array, valid).dtype != mx.bool_:
            raise TypeError(f"valid must be bool, got {cast(mx.array, valid).dtype}")
    if waiting := slots.arrived.shape[1]:
        raise ValueError(f"evict before the next absorb: a block of {waiting} tokens awaits eviction")


def _queries(slots: Slots, value: object) -> None:
    """Raise unless `value` holds the queries [N, G, S, D] of the block that awaits eviction."""
    rows, count = slots.arrived.shape
    array("queries", value, "[N, G, S, D]", (rows, None, count, slots.keys.shape[2]))
    floating("the dtype of queries", cast(mx.array, value).dtype)
    if cast(mx.array, value).shape[1] == 0:
        raise ValueError("queries must have at least one head per row, got G = 0")


def _attention(slots: Slots, value: object) -> None:
    """Raise unless `value` holds the attention mass [N, n] of the block that awaits eviction."""
    array("attention", value, "[N, n]", slots.positions.shape)
    floating("the dtype of attention", cast(mx.array, value).dtype)


def evidence(
    method: str, slots: Slots, queries: object, attention: object, *, proxy: bool = False, refused: str = ""
) -> None:
    """Raise unless exactly what `method` ranks by is given for the block that awaits eviction.

    Args:
        method: its name.
        slots: slots with S arrivals.
        queries: [N, G, S, D], or None.
        attention: [N, n], or None.
        proxy: the arriving keys act as queries: neither may be given.
        refused: why `attention` cannot be taken here; "" = it can.
    """
    if proxy:
        no_evidence(f'{method} with query_source="key_proxy"', queries, attention)
    elif (queries is None) == (attention is None):
        wanted = "queries [N, G, S, D]" + ("" if refused else " or attention [N, n]")
        raise ValueError(
            f"{method} ranks by attention: pass {wanted} of the block, got {'neither' if queries is None else 'both'}"
        )
    elif queries is not None:
        _queries(slots, queries)
    elif refused:
        raise ValueError(f"{method} cannot take attention= here: {refused}")
    else:
        _attention(slots, attention)


def no_evidence(method: str, queries: object, attention: object) -> None:
    """Raise if evidence is given to a method that ranks without it."""
    for name, value in (("queries", queries), ("attention", attention)):
        if value is not None:
            raise ValueError(f"{method} ranks without attention: {name} must be None, got {type(value).__name__}")
