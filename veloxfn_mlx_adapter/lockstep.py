"""The caches of one model notice a forward pass that broke off between two layers."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Lockstep"]


class Lockstep:
    """How many tokens each layer's cache has seen; caches that never saw any do not take part."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._heirs: dict[Hashable, Lockstep] = {}

    def check(self, layer: int, *, before: int, after: int) -> None:
        """A layer is about to see more tokens.

        Args:
            layer: its index.
            before: tokens that it has seen.
            after: tokens that it will have seen.

        Raises:
            RuntimeError: layers before it have seen another number than `after`, or layers behind it than `before`.
        """
        for other, seen in self._seen.items():
            wanted = after if other < layer else before
            if other != layer and seen not in (0, wanted):
                raise RuntimeError(
                    f"the caches are out of step: layer {other} has seen {seen} tokens where layer {layer} goes from "
                    f"{before} to {after}. A forward pass broke off between them: take its tokens back from the layers "
                    f"that saw them (cache.trim), or make the caches anew"
                )

    def note(self, layer: int, seen: int) -> None:
        """A layer has seen so many tokens."""
        self._seen[layer] = seen

    def heir(self, made: Hashable, layer: int, seen: int) -> Lockstep:
        """Of caches that are made from these, layer by layer: one for all layers of one merge, one for each sequence.

        Args:
            made: what is made, by any name that is the same in all layers.
            layer: whose cache was made.
            seen: tokens that it has seen.
        """
        heir = self._heirs.get(made)
        if heir is None or layer in heir._seen:  # else the same is made once more
            heir = self._heirs[made] = Lockstep()
        heir.note(layer, seen)
        return heir
