"""Whom the suite runs on: every method of the registry in several settings, or a third party's policy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import veloxfn
from veloxfn import cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.base import Policy, Retention
from veloxfn.placement import Contiguous, Rope
from veloxfn.testing.claims import Claims, claims_for
from veloxfn.testing.drive import AnyPolicy

__all__ = ["Subject", "load_subject", "registry"]

_BUDGETS = (1, 2, 3, 4, 5, 7, 9)
_ROOMY = (32, 16, 8)


@dataclass(frozen=True)
class Subject:
    """A family of policies, one per budget.

    Args:
        name: shown in test ids.
        make: budget -> policy; ValueError where the budget is too small for the settings.
        stated: claims, or config -> claims.
        fixed: the only budget there is, for a policy that was given ready-made.
    """

    name: str
    make: Callable[[int], AnyPolicy]
    stated: Claims | Callable[[Any], Claims] = field(default=claims_for)
    fixed: int | None = None

    def __repr__(self) -> str:
        """The name."""
        return self.name

    def claims(self, policy: AnyPolicy) -> Claims:
        """What this policy promises."""
        return self.stated if isinstance(self.stated, Claims) else self.stated(policy.config)

    def accepts(self, budget: int) -> bool:
        """Whether the settings allow this budget."""
        if self.fixed is not None:
            return budget == self.fixed
        try:
            self.make(budget)
        except ValueError:
            return False
        return True

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """Small budgets that the settings allow."""
        if self.fixed is not None:
            return (self.fixed,)
        found = tuple(filter(self.accepts, _BUDGETS)) or tuple(filter(self.accepts, range(10, 130)))[:2]
        if not found:
            raise ValueError(f"{self.name} accepts no budget from 1 to 129")
        return found

    @cached_property
    def roomy(self) -> int:
        """A budget for laws that need some room."""
        if self.fixed is not None:
            return self.fixed
        return next(filter(self.accepts, _ROOMY), self.budgets[-1])


def _made(module: Any, **settings: Any) -> Callable[[int], AnyPolicy]:
    """Policies of a module with a sink of at most one row, other settings as given (a callable takes the budget)."""

    def make(budget: int) -> AnyPolicy:
        chosen = {"sink": min(1, budget - 1)} | settings
        chosen = {name: value(budget) if callable(value) else value for name, value in chosen.items()}
        return cast(AnyPolicy, module.policy(module.Config(budget=budget, **chosen)))

    return make


def _pyramid(scorer: Any, beta: float | None, taper: float | None, **settings: Any) -> Callable[[int], AnyPolicy]:
    """PyramidKV over a scorer at the mean budget."""

    def make(budget: int) -> AnyPolicy:
        config = _made(scorer, **settings)(budget).config
        return pyramidkv.policy(pyramidkv.Config(layers=3, scorer=config, beta=beta, taper=taper))

    return make


def _half(budget: int) -> int:
    return (budget - 1) // 2


def _third(budget: int) -> int:
    return (budget - 1) // 3


def _window(budget: int) -> int:
    return max(1, _half(budget))


_CONTIGUOUS = Contiguous(Rope(dims=2))


_VARIANTS: dict[str, dict[str, Callable[[int], AnyPolicy]]] = {
    "h2o": {
        "h2o": _made(h2o),
        "h2o-token": _made(h2o, cadence="token"),
        "h2o-fading": _made(h2o, decay=0.5, recent=0),
        "h2o-last-query": _made(h2o, decay=0.0, recent=0, sink=0, cadence="token"),
        "h2o-observed": _made(h2o, recent=_half, age_normalised=True),
        "h2o-proxy": _made(h2o, recent=_half, query_source="key_proxy"),
        "h2o-proxy-observed": _made(h2o, recent=_half, query_source="key_proxy", age_normalised=True),
        "h2o-proxy-fading": _made(h2o, recent=_half, query_source="key_proxy", decay=0.9, cadence="token"),
        "h2o-shared": _made(h2o, shared_heads=2),
        "h2o-contiguous": _made(h2o, placement=_CONTIGUOUS),
    },
    "keyformer": {
        "keyformer": _made(keyformer),
        "keyformer-annealed": _made(keyformer, tau_init=0.5, tau_end=4.0, anneal_steps=11, anneal_from=3, seed=5),
        "keyformer-additive": _made(keyformer, noise="additive", anneal_steps=9, anneal_from=2),
        "keyformer-additive-token": _made(
            keyformer, noise="additive", tau=1.5, recent=_half, seed=2**40 + 3, cadence="token"
        ),
        "keyformer-silent": _made(keyformer, noise="none", tau_init=0.5, tau_end=2.0, anneal_steps=10, recent=_half),
        "keyformer-greedy": _made(keyformer, noise="additive", tau=0.0, recent=_half),
        "keyformer-contiguous": _made(keyformer, placement=_CONTIGUOUS, recent=_half),
    },
    "cam": {
        "cam": _made(cam, target_count=3),
        "cam-sums": _made(cam, target_count=2, normalise=False, gate=False, seed=7, cadence="token"),
        "cam-nearest": _made(cam, targets="nearest", merge="similarity", decay=0.9),
        "cam-nearest-mean": _made(cam, targets="nearest", merge="mean", age_normalised=True, gate=False),
        "cam-keys": _made(cam, target_count=2, merge="similarity", merge_keys=True, gate=False),
        "cam-off": _made(cam, merge="off"),
        "cam-contiguous": _made(cam, placement=_CONTIGUOUS, target_count=3, normalise=False, cadence="token"),
    },
    "tova": {
        "tova": _made(tova, sink=0),
        "tova-shared": _made(tova, shared_heads=2),
        "tova-token": _made(tova, recent=_third, cadence="token"),
        "tova-contiguous": _made(tova, placement=Contiguous(Rope(dims=2, base=50.0, traditional=True, scale=0.5))),
    },
    "snapkv": {
        "snapkv": _made(snapkv, window=_window, kernel=3, sink=0),
        "snapkv-max": _made(snapkv, window=_third, kernel=5, pooling="max"),
        "snapkv-unpooled": _made(snapkv, window=_window, kernel=1),
        "snapkv-token": _made(snapkv, window=_third, kernel=3, cadence="token"),
        "snapkv-contiguous": _made(snapkv, placement=Contiguous(Rope(dims=2, freqs=(3.0,))), window=_third),
    },
    "pyramidkv": {
        "pyramidkv": _pyramid(snapkv, 4.0, None, window=_third, kernel=3, sink=0),
        "pyramidkv-taper": _pyramid(h2o, None, 1.5),
    },
    "knorm": {
        "knorm-low": _made(knorm),
        "knorm-high": _made(knorm, keep="high", sink=0),
        "knorm-recent": _made(knorm, recent=_half),
        "knorm-token": _made(knorm, recent=_third, cadence="token"),
        "knorm-shared": _made(knorm, shared_heads=2),
        "knorm-contiguous": _made(knorm, placement=_CONTIGUOUS, cadence="token"),
    },
    "streaming_llm": {
        "streaming_llm": _made(streaming_llm, sink=lambda budget: min(2, budget - 1)),
        "sliding-window": _made(streaming_llm, sink=0),
        "streaming_llm-contiguous": _made(streaming_llm, placement=_CONTIGUOUS, sink=_third),
    },
}


def _plain(module: Any) -> Callable[[int], AnyPolicy]:
    return lambda budget: cast(AnyPolicy, module.policy(module.Config(budget=budget)))


def registry() -> list[Subject]:
    """Every method of `veloxfn.METHODS`, in several settings where some are listed, else with its defaults."""
    found = []
    for name, module in veloxfn.METHODS.items():
        variants = _VARIANTS.get(name, {name: _plain(module)})
        found += [Subject(variant, make) for variant, make in variants.items()]
    return found


def load_subject(target: str) -> Subject:
    """The subject that `package.module:factory` names.

    `factory` is a callable (budget: int) -> Policy, or a Policy. It may carry an attribute `claims`: a `Claims`, or a
    callable from Config to `Claims`.

    Raises:
        ValueError: not of the form `package.module:name`.
        TypeError: the name is neither a policy nor a callable that makes one.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"a policy is named as package.module:factory, got {target!r}")
    named = getattr(importlib.import_module(module_name), attribute)
    if isinstance(named, Policy):
        ready: AnyPolicy = named
        return Subject(target, lambda budget: ready, claims_for, fixed=_config(ready, target).budget)
    if not callable(named):
        raise TypeError(f"{target} must be a Policy or a callable (budget) -> Policy, got {type(named).__name__}")
    return Subject(target, named, getattr(named, "claims", claims_for))


def _config(policy: AnyPolicy, target: str) -> Retention:
    if not isinstance(policy.config, Retention):
        raise TypeError(f"{target}: a policy's config must be a Retention, got {type(policy.config).__name__}")
    return policy.config
