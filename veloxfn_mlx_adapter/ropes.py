"""The rotary embedding of a model's layers: read from their modules, checked against the keys that they cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import rope_utils

from veloxfn import checks
from veloxfn.placement import Rope, rotate
from veloxfn_mlx_adapter import capture

__all__ = ["STILL", "LayerProbe", "probed", "refuse", "refuse_latent", "rope_of"]

nn: Any = mlx.nn  # without types

STILL = Rope(2, freqs=(float("inf"),))
"""Turns nothing: for keys of layers without positions."""


_POSITIONS = (0, 5, 509)  # below every context length
_TOKENS = 3
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}  # of the largest number, for angles of 509 rad


def rope_of(model: Any, layer: int = 0) -> Rope:
    """The rotary embedding of one layer of an `mlx_lm` model, for `Contiguous(rope_of(model))`.

    Args:
        model: an `mlx_lm` model.
        layer: index of the layer.

    Returns:
        What the layer's own module does: tried on a random vector.

    Raises:
        ValueError: the layer has no such module, several that differ, or one of an unknown type.
        TypeError: layer is no int.

    >>> rope_of(model).dims  # doctest: +SKIP
    64
    """
    layers = list(model.layers)
    checks.integer("layer", layer, low=0, high=len(layers) - 1)
    name = _name(model, layer)
    found = {_rope_of_module(module, name) for module in _modules(layers[layer])}
    if len(found) != 1:
        kinds = "; ".join(map(str, sorted(found, key=str))) or "none"
        raise ValueError(f"{name} must have one rotary embedding among its modules, found {kinds}")
    return found.pop()


def _name(model: Any, layer: int) -> str:
    return f"layer {layer} of {type(model).__module__}.{type(model).__name__}"


def _modules(layer: Any) -> list[Any]:
    """Modules of a layer that look like rotary embeddings."""
    return [
        module
        for module in layer.modules()
        if not module.children()
        and any(word in type(module).__name__.lower() for word in ("rope", "rotary"))
        and type(module).__name__ != "NoPE"
    ]


def _rope_of_module(module: Any, name: str) -> Rope:
    kind = f"{type(module).__module__}.{type(module).__name__}"
    known: Any = module
    if type(module) is nn.RoPE:
        rope = Rope(known.dims, base=float(known.base), traditional=known.traditional, scale=float(known.scale))
    elif type(module) is rope_utils.SuScaledRoPE:
        rope = Rope(known.dim, freqs=_numbers(known._freqs))
    elif type(module) in (rope_utils.Llama3RoPE, rope_utils.YarnRoPE, rope_utils.ProportionalRoPE):
        rope = Rope(known.dims, freqs=_numbers(known._freqs), traditional=known.traditional)
    elif _depends_on_length(module):
        raise ValueError(
            f"{name} rotates with {kind}, whose frequencies depend on the length of the text: keys that were rotated "
            f"at one length cannot be turned to another; use placement=Absolute()"
        )
    else:
        raise ValueError(
            f"{name} rotates with a module that rope_of does not know, {kind}; "
            f"build the veloxfn.Rope by hand: make_prompt_cache checks it against the layer's keys"
        )
    vector = mx.random.normal((1, 1, 1, rope.dims), key=mx.random.key(0))
    start, to = (mx.array([position], mx.int32) for position in _POSITIONS[1:])
    before, after = (known(vector, offset=position) for position in _POSITIONS[1:])
    if not _close(rotate(rope, before, start=start, to=to), after):
        raise ValueError(f"{kind} of {name} does not rotate as {rope}")
    return rope


def _numbers(freqs: mx.array) -> tuple[float, ...]:
    return tuple(cast(list[float], freqs.astype(mx.float32).tolist()))


def _depends_on_length(module: Any) -> bool:
    return "dynamic" in type(module).__name__.lower() and not hasattr(module, "_freqs")


def _close(found: mx.array, wanted: mx.array) -> bool:
    found, wanted, tolerance = found.astype(mx.float32), wanted.astype(mx.float32), _TOLERANCE[wanted.dtype]
    return bool((mx.abs(found - wanted).max() <= tolerance * mx.abs(wanted).max()).item())


# What the layers really do.


@dataclass
class LayerProbe:
    """What one layer cached and asked for, at each of the positions tried."""

    layer: int
    keys: list[mx.array] = field(default_factory=list)  # [B, Hkv, 1, D]
    values: list[mx.array] = field(default_factory=list)
    asks: set[str] = field(default_factory=set)  # when the offset was read: "before" the update, "after", "late"
    shows_queries: bool = False
    adds_to_scores: bool = False  # an array that depends on the rows, such as half of the products (latent attention)

    @property
    def counts_block(self) -> bool:
        """Whether the offset is read between update and attention, where it counts the block."""
        return "after" in self.asks

    def rotates(self) -> bool:
        """Whether the keys depend on the position."""
        return any(not mx.array_equal(self.keys[0], keys) for keys in self.keys[1:])

    def latent(self) -> bool:
        """Whether what is cached as values depends on the position."""
        return any(not _close(values, self.values[0]) for values in self.values[1:] if values.size)

    def follows(self, rope: Rope) -> bool:
        """Whether `rope` turns the keys of one position into those of the others."""
        if rope.dims > self.keys[0].shape[-1]:
            return False
        start = mx.array([_POSITIONS[0]], mx.int32)
        return all(
            _close(rotate(rope, self.keys[0], start=start, to=mx.array([position], mx.int32)), keys)
            for position, keys in zip(_POSITIONS[1:], self.keys[1:], strict=True)
        )


class _ProbeCache(mlx_lm_cache._BaseCache, capture.AttentionObserver):  # type: ignore[misc]
    """An empty cache at some position that notes the keys of one token."""

    def __init__(self, probe: LayerProbe, position: int) -> None:
        self._probe, self._position, self._stage = probe, position, "before"

    @property
    def offset(self) -> int:
        self._probe.asks.add(self._stage)
        return self._position + (self._stage != "before")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return mx.ones((N, N), mx.bool_) if return_array else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._probe.keys.append(keys)
        self._probe.values.append(values)
        self._stage = "after"
        return keys, values

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any) -> Any:
        self._probe.shows_queries, self._stage = True, "late"
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            self._probe.adds_to_scores = True
        return mask

    def tied(self, output: mx.array) -> mx.array:
        return output


def probed(model: Any, layers: Sequence[int], stock: Callable[[Any], list[Any]]) -> dict[int, LayerProbe]:
    """What the layers cache of single tokens at several positions; three steps of the model.

    The query hook must be installed. `stock` makes the model's own caches, for the other layers.

    Raises:
        ValueError: the model cannot be run on single tokens.
    """
    probes = {i: LayerProbe(i) for i in layers}
    for position in _POSITIONS:
        caches = stock(model)
        for i, probe in probes.items():
            caches[i] = _ProbeCache(probe, position)
        tokens = mx.arange(_TOKENS)[:, None]
        try:
            model(tokens, cache=caches)
            mx.eval([(probe.keys, probe.values) for probe in probes.values()])
        except Exception as error:
            raise ValueError(
                f"{type(model).__module__}.{type(model).__name__} could not be run on single tokens at position "
                f"{position}, to see how its layers rotate keys: {error}"
            ) from error
    missing = [i for i, probe in probes.items() if len(probe.keys) != len(_POSITIONS)]
    if missing:
        raise ValueError(f"layers {missing} of {type(model).__module__}.{type(model).__name__} cached no keys")
    return probes


def refuse_latent(model: Any, probe: LayerProbe) -> None:
    """Raise if a layer caches more than keys that depend on the position.

    Raises:
        ValueError: its values do, so its keys are latent, its values rotated, or its positions learned.
    """
    if probe.latent():
        raise ValueError(
            f"what {_name(model, probe.layer)} caches as values depends on the position (latent keys, rotated values "
            f"or learned positions), which cannot be turned; use placement=Absolute()"
        )


def refuse(model: Any, probe: LayerProbe, rope: Rope) -> None:
    """Raise unless the keys of a layer that rotates them turn as `rope`.

    Raises:
        ValueError: the layer rotates otherwise.
    """
    name = _name(model, probe.layer)
    modules = _modules(list(model.layers)[probe.layer])
    for module in modules:
        if _depends_on_length(module):
            _rope_of_module(module, name)
    try:
        own = rope_of(model, probe.layer)
    except ValueError:  # not known: the keys decide
        own = None
    if own is not None and not _agree(rope, own):
        raise ValueError(f"the rope of placement=Contiguous is not that of {name}: {_differences(rope, own)}")
    if not probe.follows(rope):
        kinds = (
            ", ".join(sorted({f"{type(m).__module__}.{type(m).__name__}" for m in modules})) or "no module of its own"
        )
        raise ValueError(f"{name} rotates with {kinds}, and its keys do not turn as {rope}; use placement=Absolute()")


def _agree(given: Rope, own: Rope) -> bool:
    if (given.dims, given.traditional) != (own.dims, own.traditional):
        return False
    return all(a == b or abs(a - b) <= 1e-5 * b for a, b in zip(_periods(given), _periods(own), strict=True))


def _periods(rope: Rope) -> list[float]:
    freqs = rope.freqs or [rope.base ** (2 * i / rope.dims) for i in range(rope.dims // 2)]
    return [freq / rope.scale for freq in freqs]


def _differences(given: Rope, own: Rope) -> str:
    return ", ".join(
        f"{name}={_short(getattr(given, name))} (the layer's: {_short(getattr(own, name))})"
        for name in ("dims", "traditional", "base", "freqs", "scale")
        if getattr(given, name) != getattr(own, name)
    )


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"({value[0]:g}, {value[1]:g}, .., {value[-1]:g})"
    return str(value)
