"""The caches of one model notice a forward pass that broke off between two layers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

__all__ = ["Lockstep"]

Seen = tuple[int, ...]
"""Tokens of each sequence of a batch."""


class Lockstep:
    """How many tokens each layer's cache has seen; caches that never saw any do not take part.

    A copy is one of nothing: what is copied with it says again what it has seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._heirs: dict[Hashable, list[weakref.ref[Lockstep]]] = {}

    def check(self, layer: int, *, before: Seen, after: Seen) -> None:
        """A layer is about to see more tokens.

        Args:
            layer: its index.
            before: tokens that it has seen.
            after: tokens that it will have seen.

        Raises:
            RuntimeError: layers before it have seen another number than `after`, or layers behind it than `before`.
        """
        first = min(self._seen, default=layer)  # it compares all; of those behind it each is compared with it
        for other in self._seen if layer <= first else (first,):
            seen = self._seen[other]
            wanted = after if other < layer else before
            if other != layer and any(seen) and seen != wanted:
                raise RuntimeError(
                    f"the caches are out of step: layer {other} has seen {_short(seen)} tokens where layer {layer} "
                    f"goes from {_short(before)} to {_short(after)}. A forward pass broke off between them: take its "
                    f"tokens back from the layers that saw them (cache.trim), or make the caches anew"
                )

    def note(self, layer: int, seen: Seen) -> None:
        """A layer has seen so many tokens."""
        self._seen[layer] = seen

    def heir(self, made: Hashable, layer: int, seen: Seen) -> Lockstep:
        """Of caches that are made from these, layer by layer: one for all layers of one merge, one for each sequence.

        Args:
            made: what is made, by any name that is the same in all layers.
            layer: whose cache was made.
            seen: tokens that it has seen.
        """
        alive = [heir for each in self._heirs.get(made, []) if (heir := each()) is not None]
        heir = next((heir for heir in alive if layer not in heir._seen), None)
        if heir is None:  # the first, or the same is made once more
            heir = Lockstep()
            alive.append(heir)
        self._heirs = {name: left for name, left in self._heirs.items() if any(each() is not None for each in left)}
        self._heirs[made] = [weakref.ref(each) for each in alive]
        heir.note(layer, seen)
        return heir

    def __deepcopy__(self, memo: dict[int, Any]) -> Lockstep:
        return Lockstep()

    def __reduce__(self) -> tuple[type[Lockstep], tuple[()]]:
        return Lockstep, ()


def _short(seen: Seen) -> str:
    return str(seen[0]) if len(set(seen)) == 1 else str(list(seen))
