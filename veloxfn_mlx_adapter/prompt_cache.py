"""Make eviction caches for a model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, cast

from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx_lm.models import cache as mlx_lm_cache

from veloxfn import Contiguous, Policy, Retention, pyramidkv
from veloxfn_mlx_adapter import capture, measured, ropes
from veloxfn_mlx_adapter.cache import EvictingCache, policy_of
from veloxfn_mlx_adapter.diagnostics import method_name
from veloxfn_mlx_adapter.lockstep import Lockstep

__all__ = ["Attachment", "attach", "detach", "make_prompt_cache", "stock_caches"]


def make_prompt_cache(model: Any, policy: Policy[Any] | Sequence[Policy[Any] | None]) -> list[Any]:
    """One cache per layer of `model`, for `mlx_lm.generate(..., prompt_cache=...)` and whatever else takes one.

    Layers of full attention get an `EvictingCache`; sliding-window, recurrent and other layers keep the model's own.
    The model is looked at in every call; `attach` does so once for many.

    Args:
        model: an `mlx_lm` model.
        policy: a method with its config bound (`veloxfn.policy(config)`) for all layers, or one entry per layer, with
            None where the model's own cache stays. A `pyramidkv` policy for all layers is spread over those that
            evict. With `placement=Contiguous(rope)` the rope is checked against each layer; a layer that does not
            rotate, in a model where others do, is seen without gaps all the same.

    Returns:
        The caches, in the model's order.

    Raises:
        ValueError: a sequence of another length than the layers, no layer to evict from, a method that ranks by
            queries on a model whose attention does not show them, a rope that is not the layer's, or a pyramid over
            another number of layers.
        TypeError: something that is no policy, or no model.

    >>> caches = make_prompt_cache(model, veloxfn.policy(veloxfn.h2o.Config(budget=256)))  # doctest: +SKIP
    """
    caches = stock_caches(model)
    with capture.query_capture(model):
        return _planned(model, caches, policy).over(caches)


def attach(model: Any, policy: Policy[Any] | Sequence[Policy[Any] | None]) -> Attachment:
    """Make eviction caches what `mlx_lm` gets whenever it asks `model` for caches: in `generate`, batches, a server.

    The model is looked at once, here; caches are then made fresh for every use. Attaching again replaces. Until
    `detach(model)`, or the end of a `with attach(model, policy):` block, which also brings back what was attached
    around it.

    Args:
        model: an `mlx_lm` model; it gets an attribute `make_cache`, its weights are left alone.
        policy: as for `make_prompt_cache`.

    Returns:
        The attachment, a context manager.

    Raises:
        ValueError: as `make_prompt_cache`; the model then stays as it was.
        TypeError: something that is no policy, or no model.

    >>> with attach(model, veloxfn.policy(veloxfn.h2o.Config(budget=256))):  # doctest: +SKIP
    ...     text = mlx_lm.generate(model, tokenizer, "The sky is")
    """
    caches = stock_caches(model)
    with capture.query_capture(model):
        attachment = Attachment(model, _planned(model, caches, policy))
    model.make_cache = attachment
    return attachment


def detach(model: Any) -> None:
    """Give `model` back the `make_cache` that it had before `attach`, however often that was called.

    Raises:
        ValueError: nothing is attached.
    """
    attached = _attached(model)
    if attached is None:
        other = getattr(model, "__dict__", {}).get("make_cache")
        why = "" if other is None else f": its make_cache is {other!r}"
        raise ValueError(f"no eviction caches are attached to {_name(model)}{why}")
    while isinstance(attached.before, Attachment):
        attached = attached.before
    attached.restore(model)


class Attachment:
    """A model's `make_cache` while eviction caches are attached; called, it makes them. `attach` returns one."""

    def __init__(self, model: Any, plan: _Plan) -> None:
        self._plan, self._model, self._entered = plan, weakref.ref(model), False  # weak: no cycle keeps the weights
        around = _attached(model)
        self.stock: Callable[[], Any] = _stock(model) if around is None else around.stock
        self.before = vars(model).get("make_cache", _ABSENT)
        if around is not None and not around._entered:
            self.before = around.before
        capture.hold(self)

    def __call__(self) -> list[Any]:
        """Fresh caches, in the model's order."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model that these caches were attached to is gone; attach to the one in use")
        if not capture.hook_installed():  # remove_hook() was called meanwhile
            with capture.query_capture(model):
                capture.hold(self)
        return self._plan.over(stock_caches(model))

    def restore(self, model: Any) -> None:
        """Put back the `make_cache` that was there before."""
        if self.before is _ABSENT:
            del model.make_cache
        else:
            model.make_cache = self.before

    def __enter__(self) -> Attachment:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        model = self._model()
        held = None if model is None else _attached(model)
        while isinstance(held, Attachment):
            if held is self:
                self.restore(model)
                return
            held = held.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self


_ABSENT = object()


def stock_caches(model: Any) -> list[Any]:
    """The model's own caches, whatever is attached to it.

    Raises:
        TypeError: not a model.
    """
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        hint = "; mlx_lm.load returns (model, tokenizer)" if isinstance(model, tuple) else ""
        raise TypeError(f"model must be an mlx_lm model, got {type(model).__name__}{hint}")
    attached = _attached(model)
    if attached is None:
        return cast(list[Any], mlx_lm_cache.make_prompt_cache(model))
    make = attached.stock()
    stand_in = SimpleNamespace(layers=model.layers) if make is None else SimpleNamespace(make_cache=make)
    return cast(list[Any], mlx_lm_cache.make_prompt_cache(stand_in))


def _attached(model: Any) -> Attachment | None:
    held = getattr(model, "__dict__", {}).get("make_cache")
    return held if isinstance(held, Attachment) else None


def _stock(model: Any) -> Callable[[], Any]:
    """Returns the model's own make_cache, None where it has none, and does not keep the model alive."""
    make = getattr(model, "make_cache", None)
    if isinstance(make, MethodType) and make.__self__ is model:
        return weakref.WeakMethod(make)
    return lambda: make


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which layers evict, and how."""

    owner: str
    policies: dict[int, Policy[Any]]  # by layer
    counts_block: frozenset[int]  # layers whose model reads the offset between update and attention
    shards: dict[int, int]  # which part of a layer's kv heads is here
    alone: bool  # later layers with the model's own caches read the mask of the first that evicts

    def over(self, caches: list[Any]) -> list[Any]:
        """Caches of a model, with those of evicting layers in place of its own."""
        lockstep = Lockstep()
        for i, policy in self.policies.items():
            caches[i] = EvictingCache(
                policy,
                layer=i,
                owner=self.owner,
                counts_block=i in self.counts_block,
                shard=self.shards.get(i, 0),
                alone=self.alone,
                lockstep=lockstep,
            )
        return caches


def _planned(model: Any, caches: list[Any], policy: Any) -> _Plan:
    """Check a policy against a model and its own caches. The query hook must be installed."""
    full = [type(cache) is mlx_lm_cache.KVCache for cache in caches]
    policies = _per_layer(_spread(policy, full), len(caches))
    owner = _name(model)
    wanted = [i for i, chosen in enumerate(policies) if chosen is not None and full[i]]
    if not wanted:
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        raise ValueError(
            f"{owner} has no layer to evict from: policies are for caches of type KVCache, "
            f"{len(caches)} layers have {kinds}, {sum(p is not None for p in policies)} have a policy"
        )
    layers = list(getattr(model, "layers", []))
    budgets = {
        chosen.config.budget if chosen is not None else None
        for chosen, is_full in zip(policies, full, strict=True)
        if is_full
    }
    probes = _placed(model, caches, policies, wanted)
    for i in wanted:
        chosen = cast(Policy[Any], policies[i])
        hooked = capture.uses_hook(layers[i] if len(layers) == len(caches) else model)
        if len(budgets) > 1 and not hooked:
            raise ValueError(
                f"layers of {owner} share one mask and do not call mlx_lm's scaled_dot_product_attention, which "
                f"fits it to each: give all full-attention layers one budget, got {sorted(budgets, key=str)}"
            )
        if chosen.config.needs_queries and not hooked:
            raise ValueError(
                f"{method_name(chosen.config)} ranks by the model's queries, but layer {i} of {owner} does not "
                f"call mlx_lm's scaled_dot_product_attention, which shows them; "
                f"methods without queries (knorm, streaming_llm) work with it"
            )
    if len(budgets) > 1:
        _check_scores(model, owner, budgets, full)
    measured.warn_of(cast(Policy[Any], policies[i]).config for i in wanted)
    counts = frozenset(i for i in wanted if i in probes and probes[i].counts_block)
    shards = {i: _shard(layers[i]) for i in wanted} if len(layers) == len(caches) else {}
    first, after = full.index(True), [i for i, is_full in enumerate(full) if is_full and policies[i] is None]
    alone = first in wanted and bool(after)
    return _Plan(owner, {i: cast(Policy[Any], policies[i]) for i in wanted}, counts, shards, alone)


def _check_scores(model: Any, owner: str, budgets: set[int | None], full: list[bool]) -> None:
    """Raise if a layer adds an array to its scores, which is made for the rows of one layer and fits no other's.

    Raises:
        ValueError: one does.
    """
    try:
        probes = ropes.probed(model, [i for i, is_full in enumerate(full) if is_full], stock_caches)
    except ValueError:  # a model that cannot be tried on single tokens says later what does not fit
        return
    if adding := [i for i, probe in probes.items() if probe.adds_to_scores]:
        raise ValueError(
            f"layers {adding[0]} to {adding[-1]} of {owner} add an array to their scores that is made for one number "
            f"of rows: give all full-attention layers one budget, got {sorted(budgets, key=str)} (None = no policy)"
        )


def _shard(layer: Any) -> int:
    """Which part of the layer's kv heads is in this process, after `model.shard`; 0 = the first or all."""
    for name, part in layer.named_modules():
        keys = "k" in name.rpartition(".")[2].partition("_")[0]  # k_proj, qkv_proj
        if keys and isinstance(part, AllToShardedLinear | QuantizedAllToShardedLinear):
            return int(part.group.rank())
    return 0


def _name(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__name__}"


def _spread(policy: Any, full: list[bool]) -> Any:
    """A pyramid for all layers as one policy per layer, the budgets over the `full` ones; others as they are."""
    if not isinstance(policy, Policy) or type(policy.config) is not pyramidkv.Config:
        return policy
    layers = sum(full)
    if policy.config.layers != layers:
        raise ValueError(f"pyramidkv's layers must be those that evict, {layers}, got layers={policy.config.layers}")
    configs = iter(pyramidkv.layer_configs(policy.config))
    return [policy_of(next(configs)) if is_full else None for is_full in full]


def _placed(
    model: Any, caches: list[Any], policies: list[Policy[Any] | None], wanted: list[int]
) -> dict[int, ropes.LayerProbe]:
    """Check each `Contiguous` policy against its layer; in place of that of a layer without positions, one for it."""
    chosen = {i: cast(Policy[Any], policies[i]) for i in wanted}
    turned = [i for i in wanted if isinstance(chosen[i].config.placement, Contiguous)]
    if not turned:
        return {}
    owner = _name(model)
    if len(list(getattr(model, "layers", []))) != len(policies):
        raise ValueError(f"placement=Contiguous needs one cache per layer of {owner}, got {len(policies)} caches")
    kinds = (mlx_lm_cache.KVCache, mlx_lm_cache.RotatingKVCache)
    held = [i for i, cache in enumerate(caches) if type(cache) in kinds]
    probes = ropes.probed(model, held, stock_caches)
    rotating = [i for i, probe in probes.items() if probe.rotates()]
    for i in turned:
        ropes.refuse_latent(model, probes[i])
    if not set(turned) & set(rotating):
        raise ValueError(
            f"placement=Contiguous is for rotary embeddings: the evicting layers of {owner} do not rotate their keys"
        )
    for i in turned:
        probe = probes[i]
        if i in rotating:
            ropes.refuse(model, probe, cast(Contiguous, chosen[i].config.placement).rope)
        else:
            policies[i] = _without_positions(chosen[i], i, owner)
        if "late" in probe.asks or ("after" in probe.asks and not probe.shows_queries):
            raise ValueError(
                f"layer {i} of {owner} reads its cache's offset after its attention, where placement=Contiguous "
                f"cannot tell the tokens of the block from the place of the next one; use placement=Absolute()"
            )
    unasked = [i for i in rotating if not probes[i].asks]
    offsets = {(chosen[i].config.budget if i in turned else None) for i in probes}
    if unasked and len(offsets) > 1:
        raise ValueError(
            f"layers {unasked} of {owner} are rotated at the offset of another layer's cache: with "
            f"placement=Contiguous all layers must share one budget, and none keep the model's own cache"
        )
    return probes


def _without_positions(policy: Policy[Any], layer: int, owner: str) -> Policy[Any]:
    """The same policy, turning nothing."""
    config = dataclasses.replace(policy.config, placement=Contiguous(ropes.STILL))
    try:
        return policy_of(config)
    except TypeError:
        raise ValueError(
            f"layer {layer} of {owner} does not rotate its keys: give it {policy.config!r} with "
            f"placement=Absolute(), or None"
        ) from None


def _per_layer(policy: Any, layers: int) -> list[Policy[Any] | None]:
    policies = [policy] * layers if isinstance(policy, Policy) else policy
    if not isinstance(policies, list | tuple):
        kind = type(policies).__name__
        raise TypeError(f"policy must be a veloxfn.Policy or one per layer, got {kind}{_hint(policies)}")
    if len(policies) != layers:
        raise ValueError(f"policies must have one entry per cache of the model: {layers}, got {len(policies)}")
    for i, chosen in enumerate(policies):
        if chosen is not None and not isinstance(chosen, Policy):
            kind = type(chosen).__name__
            raise TypeError(f"policies[{i}] must be a veloxfn.Policy or None, got {kind}{_hint(chosen)}")
    return list(policies)


def _hint(value: Any) -> str:
    return "; bind it: veloxfn.policy(config)" if isinstance(value, Retention) else ""
