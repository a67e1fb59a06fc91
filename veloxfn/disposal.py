"""What happens to the tokens that lose their slot."""

from __future__ import annotations

from typing import Protocol, TypeVar

import mlx.core as mx

from veloxfn.base import State

__all__ = ["Dispose", "drop"]

S = TypeVar("S", bound=State)


class Dispose(Protocol):
    """A disposal rule: the state with the losers' content used, before their slots are freed."""

    def __call__(self, state: S, lost: mx.array, /) -> S:
        """Use what the slots `lost` [N, n] bool hold; every slot that is not lost and not free survives."""
        ...


def drop(state: S, lost: mx.array, /) -> S:
    """Forget the losers."""
    return state
