"""Sequences of different lengths in one batch: what each has seen, where padding is, and what each token may see.

A cache holds B sequences of Hkv rows each. Rows of a sequence that is shorter than its neighbours have free slots,
which must not be attended to. They lie at the same places in all heads, and in all layers of one budget: eviction
begins in a row only when no slot is free but the one that the next token takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

import veloxfn
from veloxfn import Slots
from veloxfn.evidence import arrival_positions, visible_to

__all__ = ["Padding", "Sequences", "Span", "coming_mask", "joined", "rows_of", "valid_of", "visible"]

Span = tuple[int, int]
"""Tokens start .. stop - 1 of a block belong to the sequence, the others are padding."""


@dataclass(frozen=True)
class Padding:
    """What the next tokens of each sequence are."""

    left: tuple[int, ...]  # so many are padding
    length: tuple[int, ...] | None = None  # then so many are not, and what follows is; None = no end
    right: tuple[int, ...] | None = None  # so many of the next block's last are: `length` is not known yet

    def next_block(self, count: int) -> tuple[tuple[Span, ...], Padding]:
        """The span of each sequence in the next `count` tokens, and the padding after them.

        Raises:
            ValueError: only the number of padded tokens was given, and they reach over several blocks.
            RuntimeError: more tokens than were spoken of.
        """
        length = self.length
        if self.right is not None:
            if max(self.right) > count:
                raise ValueError(
                    f"right_padding of {max(self.right)} tokens in a block of {count}: give lengths= to prepare as well"
                )
            length = tuple(count - padded for padded in self.right)
        if length is not None and not any(length) and not any(self.left) and count:
            raise RuntimeError("all tokens that prepare spoke of have come; call finalize before the next ones")
        starts = [min(padded, count) for padded in self.left]
        stops = [count] * len(starts)
        if length is not None:
            stops = [min(count, start + own) for start, own in zip(starts, length, strict=True)]
            length = tuple(own - stop + start for own, start, stop in zip(length, starts, stops, strict=True))
        left = tuple(padded - start for padded, start in zip(self.left, starts, strict=True))
        return tuple(zip(starts, stops, strict=True)), Padding(left, length)


@dataclass(frozen=True)
class Sequences:
    """How far the sequences of a batch are; all fields but padding have one entry per sequence."""

    seen: tuple[int, ...] = (0,)  # tokens, padding not counted
    spans: tuple[Span, ...] = ((0, 0),)  # in the block that awaits eviction
    padding: Padding | None = None  # of the tokens to come

    @classmethod
    def new(cls, batch: int) -> Sequences:
        """`batch` sequences that have seen nothing."""
        return cls((0,) * batch, ((0, 0),) * batch)

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.seen)

    @property
    def blank(self) -> bool:
        """Whether nothing is known of them, not even how many there are."""
        return self == Sequences()

    def before(self) -> list[int]:
        """Tokens that each had seen before the block that awaits eviction."""
        return [seen - stop + start for seen, (start, stop) in zip(self.seen, self.spans, strict=True)]

    def offsets(self, budget: int | None = None, *, with_block: bool = False) -> int | mx.array:
        """Rotary position of each next token: tokens seen, or kept where a budget is given.

        Args:
            budget: rows kept; None = all.
            with_block: the block that awaits eviction is counted as kept.

        Returns:
            [B] int32, less the padding that comes first; an int where all are the same.
        """
        if budget is None:
            places = list(self.seen)
        elif with_block:
            block = (stop - start for start, stop in self.spans)
            places = [min(seen, budget) + own for seen, own in zip(self.before(), block, strict=True)]
        else:
            places = [min(seen, budget) for seen in self.seen]
        if self.padding is not None:
            places = [place - left for place, left in zip(places, self.padding.left, strict=True)]
        return places[0] if len(set(places)) == 1 else mx.array(places, mx.int32)

    def next_spans(self, count: int) -> tuple[Span, ...]:
        """The span of each sequence in the next `count` tokens."""
        return ((0, count),) * len(self) if self.padding is None else self.padding.next_block(count)[0]

    def fed(self, count: int) -> Sequences:
        """After the next `count` tokens."""
        spans, padding = (self.next_spans(count), None) if self.padding is None else self.padding.next_block(count)
        seen = tuple(n + stop - start for n, (start, stop) in zip(self.seen, spans, strict=True))
        return Sequences(seen, spans, padding)

    def settled(self) -> Sequences:
        """With no block awaiting eviction."""
        return replace(self, spans=((0, 0),) * len(self))

    def taken_back(self, left: int) -> Sequences:
        """With only the first `left` tokens of the block that awaits eviction."""
        spans = tuple((min(start, left), min(stop, left)) for start, stop in self.spans)
        seen = tuple(n + stop - start for n, (start, stop) in zip(self.before(), spans, strict=True))
        if self.padding is None:
            return replace(self, seen=seen, spans=spans)
        padded = tuple(n + max(start - left, 0) for n, (start, _) in zip(self.padding.left, self.spans, strict=True))
        length = self.padding.length
        if length is not None:
            length = tuple(n + now - then for n, now, then in zip(length, self.seen, seen, strict=True))
        return Sequences(seen, spans, Padding(padded, length))

    def taken(self, indices: Sequence[int]) -> Sequences:
        """The sequences `indices`."""
        return Sequences(_pick(self.seen, indices), _pick(self.spans, indices), _taken(self.padding, indices))

    def prepared(
        self, left: Sequence[int] | None, lengths: Sequence[int] | None, right: Sequence[int] | None
    ) -> Sequences:
        """With padding among the tokens to come; the arguments are those of `EvictingCache.prepare`."""
        given = [
            numbers.tolist() if isinstance(numbers, mx.array) else list(numbers)
            for numbers in (left, lengths, right)
            if numbers is not None
        ]
        made = Sequences.new(len(given[0])) if self.blank and given and given[0] else self
        for numbers in given:
            if len(numbers) != len(made) or any(int(number) != number or number < 0 for number in numbers):
                raise ValueError(f"padding is one count >= 0 for each of {len(made)} sequences, got {numbers}")
        if left is not None and self.longest:
            raise ValueError(f"left_padding comes before all tokens, but {self.longest} were seen")
        zeros = (0,) * len(made)
        first, length, last = (
            None if numbers is None else tuple(int(n) for n in numbers) for numbers in (left, lengths, right)
        )
        if length is not None and last is not None and len({a + b for a, b in zip(length, last, strict=True)}) > 1:
            raise ValueError(
                f"lengths and right_padding of each sequence must have one sum, got {list(length)} and {list(last)}"
            )
        before = zeros if made.padding is None else made.padding.left
        padded = tuple(a + b for a, b in zip(before, first or zeros, strict=True))
        return replace(made, padding=Padding(padded, length, None if length is not None else last))

    def uneven(self, kept: int, budget: int, count: int) -> bool:
        """Whether the next `count` tokens will see free slots among `kept` rows, or are padding in part."""
        if any(min(seen, budget) < kept for seen in self.seen):
            return True
        return any(span != (0, count) for span in self.next_spans(count))

    def live(self, budget: int) -> list[int]:
        """Rows of each that hold a token, those of the block that awaits eviction among them."""
        return [min(n, budget) + stop - start for n, (start, stop) in zip(self.before(), self.spans, strict=True)]

    @staticmethod
    def together(parts: Sequence[Sequences]) -> Sequences:
        """The sequences of all parts, with no block awaiting eviction."""
        padding = None
        if any(part.padding is not None for part in parts):
            left = tuple(n for part in parts for n in (part.padding.left if part.padding else (0,) * len(part)))
            if any(part.padding is not None and (part.padding.length or part.padding.right) for part in parts):
                raise ValueError("sequences are joined before prepare or after finalize, not amid padded tokens")
            padding = Padding(left)
        seen = tuple(n for part in parts for n in part.seen)
        return Sequences(seen, ((0, 0),) * len(seen), padding)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        padding = None if self.padding is None else [self.padding.left, self.padding.length, self.padding.right]
        return {"seen": self.seen, "spans": self.spans, "padding": padding}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Sequences:
        """What `record` described."""
        padding = None
        if record["padding"] is not None:
            left, length, right = record["padding"]
            padding = Padding(tuple(left), length and tuple(length), right and tuple(right))
        return cls(tuple(record["seen"]), tuple((start, stop) for start, stop in record["spans"]), padding)


def _pick(values: Sequence[Any], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in indices)


def _taken(padding: Padding | None, indices: Sequence[int]) -> Padding | None:
    if padding is None:
        return None
    length, right = (None if part is None else _pick(part, indices) for part in (padding.length, padding.right))
    return Padding(_pick(padding.left, indices), length, right)


def valid_of(spans: Sequence[Span], count: int) -> mx.array | None:
    """Tokens [B, count] bool that are not padding; None where none is."""
    if all(span == (0, count) for span in spans):
        return None
    starts, stops = (mx.array(ends, mx.int32)[:, None] for ends in zip(*spans, strict=True))
    here = mx.arange(count, dtype=mx.int32)
    return (here >= starts) & (here < stops)


def coming_mask(state: Any, valid: mx.array | None, *, batch: int, count: int, budget: int) -> mx.array:
    """What the next `count` tokens will see, before they are absorbed.

    Args:
        state: a method's state, evicted; None before the first token.
        valid: [B, count] bool, False = padded; None = all valid.
        batch: sequences B.
        count: tokens.
        budget: rows that the method keeps.

    Returns:
        [B, 1, count, kept + count] bool, in the order of slots that `absorb` will make. A padded token sees everything:
        what it computes is not used, but must be finite.
    """
    valid = mx.ones((batch, count), mx.bool_) if valid is None else valid
    kept, tail = mx.zeros((batch, 0), mx.bool_), valid
    if state is not None:
        positions = state.slots.positions[:: state.slots.positions.shape[0] // batch]  # of each sequence's first head
        kept = positions >= 0
        if positions.shape[1] == budget + 1:  # the first token takes the first free slot
            free = mx.argmin(positions, axis=1, keepdims=True)
            kept, tail = mx.where(mx.arange(budget + 1) == free, valid[:, :1], kept), valid[:, 1:]
    causal = mx.tri(count, count, dtype=mx.bool_)[:, count - tail.shape[1] :] & tail[:, None]
    seen = mx.broadcast_to(kept[:, None], (batch, count, kept.shape[1]))
    return (mx.concatenate([seen, causal], axis=2) | ~valid[..., None])[:, None]


def visible(state: Any, *, batch: int) -> mx.array:
    """What each token of the block that awaits eviction sees: [B, 1, S, n] bool, in the order of the slots.

    A padded token sees everything.
    """
    heads = state.slots.positions.shape[0] // batch
    slots = Slots(*(leaf[::heads] for leaf in state.slots))  # of the first head of each sequence
    seen = visible_to(slots, arrival_positions(slots))
    return (seen | (slots.arrived < 0)[..., None])[:, None]


def rows_of(indices: Sequence[int], heads: int) -> mx.array:
    """Rows [len(indices) * heads] of the sequences `indices`."""
    return (mx.array(list(indices), mx.int32)[:, None] * heads + mx.arange(heads, dtype=mx.int32)).reshape(-1)


def joined(states: Sequence[Any]) -> Any:
    """The rows of all states, in order; no row is copied often, however many states there are."""
    if len(states) == 1:
        return states[0]
    half = len(states) // 2
    return veloxfn.concat_rows(joined(states[:half]), joined(states[half:]))
