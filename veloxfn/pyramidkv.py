"""PyramidKV: more rows for the first layers than for the last (Cai et al. 2024, arXiv 2406.02069).

    budget of layer l falls linearly with l around the scorer's budget, their mean        `budgets.pyramid`
    importance_j = the scorer's                                                            SnapKV in the paper

`layer_configs(config)` gives each layer its own scorer Config; layers never talk to each other. The functions of this
module serve one layer alone: they are the scorer's, at the mean budget. `make_prompt_cache` of the adapter spreads the
budgets over a model's layers.

Claims: those of the scorer. beta = 1 or taper = 1 is the scorer bit for bit.

Measured: on a model of 30 layers and 135M parameters equal budgets lose less than any pyramid of the same rows, and
the steeper the worse (one text, KL: SnapKV 0.064, beta 2 / 5 / 20: 0.070 / 0.076 / 0.082; H2O 0.045, taper 1.25 / 1.5 /
1.9: 0.048 / 0.055 / 0.078).

Differs from the paper: the budgets sum exactly to layers x mean (the authors' overshoot by up to 11.7 %), never
increase from layer to layer, and no layer loses rows when the mean rises.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from veloxfn import budgets, checks, h2o, snapkv
from veloxfn.base import Policy, Retention
from veloxfn.binding import bind, module_of
from veloxfn.snapkv import State

__all__ = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]


_SHARED = ("budget", "placement", "cadence", "shared_heads", "sink")


@dataclass(frozen=True, kw_only=True)
class Config(Retention):
    """Settings of PyramidKV; budget (the mean), placement, cadence, shared_heads and sink are the scorer's.

    Args:
        layers: layers that share layers x budget rows.
        scorer: the Config of any method, with the mean budget; its windows must fit into the smallest layer. None = a
            SnapKV with the settings given here; with taper an H2O.
        beta: >= 1: the last layer has 1 / beta of the mean's rows above the floor, the scorer's recent window. None
            becomes 20, the paper's, unless taper is given.
        taper: >= 1, in place of beta: half the difference between first and last layer is taper - 1 times the mean's
            rows above the floor, sink + 1.

    Raises:
        ValueError: a number outside its range, both beta and taper, a mean below the floor, or a shared setting that
            differs from the scorer's.
        TypeError: a scorer that is the Config of no method.
    """

    # None = the scorer's; all are set once the config is made.
    budget: int = None  # type: ignore[assignment]
    placement: Any = None
    cadence: str = None  # type: ignore[assignment]
    shared_heads: int = None  # type: ignore[assignment]
    sink: int = None  # type: ignore[assignment]
    layers: int = 1
    scorer: Retention = None  # type: ignore[assignment]
    beta: float | None = None
    taper: float | None = None

    @property
    def recent_rows(self) -> int:
        """Last arrivals that are protected at the mean budget."""
        return self.scorer.recent_rows

    @property
    def needs_queries(self) -> bool:
        """Whether `evict` must be given the block's queries (or attention)."""
        return self.scorer.needs_queries

    @property
    def merges_losers(self) -> bool:
        """Whether what is evicted leaves something in the rows that stay."""
        return self.scorer.merges_losers

    def __post_init__(self) -> None:
        """Agree with the scorer, and validate the budgets."""
        given = {name: getattr(self, name) for name in _SHARED if getattr(self, name) is not None}
        if self.scorer is None:
            kind = snapkv.Config if self.taper is None else h2o.Config
            object.__setattr__(self, "scorer", kind(**given))
        checks.instance("scorer", self.scorer, Retention)
        module_of(self.scorer)
        if isinstance(self.scorer, Config):
            raise ValueError(f"scorer must rank by itself, got {self.scorer!r}")
        for name, value in given.items():
            if value != getattr(self.scorer, name):
                raise ValueError(
                    f"{name} is the scorer's, {getattr(self.scorer, name)!r}; got {name}={value!r} beside it"
                )
        for name in _SHARED:
            object.__setattr__(self, name, getattr(self.scorer, name))
        super().__post_init__()
        checks.integer("layers", self.layers, low=1)
        if self.beta is None and self.taper is None:
            object.__setattr__(self, "beta", 20.0)
        layer_budgets(self)


def layer_budgets(config: Config) -> tuple[int, ...]:
    """Rows of each layer, first layer first; they sum to layers x budget.

    No layer gets fewer rows than the scorer accepts.
    """
    floor = config.recent_rows if config.taper is None else config.sink + 1
    rows = _dealt(config, floor)
    if not _accepts(config.scorer, rows[-1]):
        floor = least_budget(config.scorer, floor)
        rows = _dealt(config, floor)
    return rows


def _dealt(config: Config, floor: int) -> tuple[int, ...]:
    return budgets.pyramid(config.layers, config.budget, beta=config.beta, taper=config.taper, floor=floor)


def least_budget(scorer: Retention, low: int = 1) -> int:
    """The least budget from `low` on, up to its own, that a Config accepts: its windows must fit.

    >>> least_budget(snapkv.Config(budget=64, window=32))
    33
    """
    return next(budget for budget in range(low, scorer.budget + 1) if _accepts(scorer, budget))


def _accepts(scorer: Retention, budget: int) -> bool:
    try:
        dataclasses.replace(scorer, budget=budget)
    except ValueError:
        return False
    return True


def layer_configs(config: Config) -> list[Retention]:
    """The scorer's Config of each layer, first layer first.

    >>> config = Config(layers=4, scorer=snapkv.Config(budget=64, window=16), beta=4.0)
    >>> [layer.budget for layer in layer_configs(config)]
    [100, 76, 52, 28]
    """
    return [dataclasses.replace(config.scorer, budget=budget) for budget in layer_budgets(config)]


def init_state(
    config: Config,
    rows: int,
    key_dim: int,
    value_dim: int | None = None,
    *,
    dtype: mx.Dtype = mx.float16,
    streams: mx.array | None = None,
) -> Any:
    """An empty state of the scorer, at the mean budget; arguments as there. `State` is the default scorer's."""
    return _scorer(config).init_state(config.scorer, rows, key_dim, value_dim, dtype=dtype, streams=streams)


def absorb(config: Config, state: Any, keys: mx.array, values: mx.array, *, valid: mx.array | None = None) -> Any:
    """The scorer's."""
    return _scorer(config).absorb(config.scorer, state, keys, values, valid=valid)


def evict(config: Config, state: Any, *, queries: mx.array | None = None, attention: mx.array | None = None) -> Any:
    """The scorer's."""
    return _scorer(config).evict(config.scorer, state, queries=queries, attention=attention)


def update_batched(
    config: Config,
    state: Any,
    keys: mx.array,
    values: mx.array,
    *,
    queries: mx.array | None = None,
    attention: mx.array | None = None,
    valid: mx.array | None = None,
) -> Any:
    """The scorer's `evict` after its `absorb`."""
    return _scorer(config).update_batched(
        config.scorer, state, keys, values, queries=queries, attention=attention, valid=valid
    )


def get_kv(config: Config, state: Any) -> tuple[mx.array, mx.array]:
    """The scorer's."""
    pair: tuple[mx.array, mx.array] = _scorer(config).get_kv(config.scorer, state)
    return pair


def policy(config: Config) -> Policy[Any]:
    """The functions of this module with `config` bound."""
    return bind(config, init_state, absorb, evict, update_batched, get_kv)


def _scorer(config: Config) -> ModuleType:
    return module_of(config.scorer)
