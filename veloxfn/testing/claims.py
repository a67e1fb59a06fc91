"""What each method promises beyond the universal laws, as a function of its Config.

A third party states its own: `Claims(...)` handed to the laws, or as the attribute `claims` of the factory that
`pytest properties --policy package.module:factory` names (a `Claims`, or a callable from Config to `Claims`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from veloxfn import cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.base import Retention
from veloxfn.placement import Absolute
from veloxfn.testing.oracle import (
    Score,
    score_h2o,
    score_keyformer,
    score_knorm,
    score_pyramidkv,
    score_snapkv,
    score_streaming_llm,
    score_tova,
)

__all__ = ["CLAIMS", "Claims", "Worth", "claims_for"]

Worth = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""Keys of one row [T, D] -> importance of each token [T], from the token alone (and its place in the row)."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Promises of one policy; the defaults promise nothing beyond the universal laws.

    Args:
        needs_queries: `evict` must be given queries.
        takes_queries: `evict` may be given queries; False = it must refuse them.
        takes_attention: `evict` accepts `attention=`.
        split_invariant: how arrivals are grouped into blocks does not matter.
        worth: importance of a token on its own; set, the method claims `global_best`: what is kept is the protected
            rows plus the best of everything seen.
        score: the method's importance in float64 for `Oracle`; set, every eviction is checked against it.
        budgets_nest: what budget B keeps, budget B + 1 keeps too, with the same sinks and recent window.
        content_independent: keys, values and queries do not influence which positions are kept.
        exact: decisions on grid-valued keys are exact, ties included; otherwise near ties may part.
        ties_exactly: equal keys are equally important in any arithmetic.
        bit_copies: a kept row is a bit copy of an arrival; False for methods that merge.
        rows_independent: no row looks at another; False with shared_heads > 1.
        in_place: a one-token step at full budget touches O(D) bytes per row beyond the scoring product.
        scores_keys: a step may read all stored keys once, in the scoring product.
        turns_keys: keys are seen at their ranks: what a step scores is turned first, and the slots hold other bits.
        compares_keys: a step may read all stored keys once more, to compare them with the lost one's: a product, and
            their norms.
        block_without_loop: the graph of a block does not grow with its tokens.
        may_freeze: settings under which arrivals are always the weakest.
        nan_is_weak: a key that holds NaN ends up unimportant; False where keys are not looked at.
    """

    needs_queries: bool = False
    takes_queries: bool = True
    takes_attention: bool = False
    split_invariant: bool = False
    worth: Worth | None = None
    score: Score | None = None
    budgets_nest: bool = False
    content_independent: bool = False
    exact: bool = False
    ties_exactly: bool = False
    bit_copies: bool = True
    rows_independent: bool = True
    in_place: bool = True
    scores_keys: bool = False
    turns_keys: bool = False
    compares_keys: bool = False
    block_without_loop: bool = False
    may_freeze: bool = False
    nan_is_weak: bool = False

    @property
    def global_best(self) -> bool:
        """What is kept is the protected rows plus the best of everything seen."""
        return self.worth is not None

    @property
    def path_independent(self) -> bool:
        """Split invariance and global best together."""
        return self.split_invariant and self.global_best


def _low_norm(keys: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return -_high_norm(keys)


def _high_norm(keys: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    squares: npt.NDArray[np.float64] = (keys**2).sum(axis=-1)
    return np.sqrt(squares)


def _age(keys: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.arange(len(keys), dtype=np.float64)


def _h2o(config: Retention) -> Claims:
    assert isinstance(config, h2o.Config)
    true_queries = config.query_source == "true"
    fades = config.decay <= 0.5  # slower decay leaves an arrival, with one query's worth, the weakest for long
    return Claims(
        score=score_h2o,
        ties_exactly=config.decay == 0.0,
        needs_queries=true_queries,
        takes_queries=true_queries,
        takes_attention=true_queries,
        split_invariant=config.cadence == "token",
        rows_independent=config.shared_heads == 1,
        scores_keys=True,
        block_without_loop=config.cadence == "block",
        may_freeze=config.recent_rows == 0 and (not true_queries or not (fades or config.age_normalised)),
        nan_is_weak=config.shared_heads == 1,  # a broken key gets no mass, but the other heads' mass counts for it
    )


def _keyformer(config: Retention) -> Claims:
    """Additive noise can outweigh a mass of 0 for ever, so only noise on the logits leaves a broken key weak."""
    assert isinstance(config, keyformer.Config)
    true_queries = config.query_source == "true"
    return Claims(
        score=score_keyformer,
        needs_queries=true_queries,
        takes_queries=true_queries,
        takes_attention=true_queries and config.noise == "additive",
        split_invariant=config.cadence == "token",
        rows_independent=config.shared_heads == 1,
        scores_keys=True,
        block_without_loop=config.cadence == "block",
        may_freeze=config.recent_rows == 0,
        nan_is_weak=config.shared_heads == 1 and config.noise != "additive",
    )


def _cam(config: Retention) -> Claims:
    """Keeps by h2o's rule; a survivor that received something is no copy of an arrival any more.

    A step touches `target_count` rows of values; the nearest key is sought among all.
    """
    assert isinstance(config, cam.Config)
    merges = config.merge != "off"
    return replace(_h2o(config), bit_copies=not merges, compares_keys=merges and config.targets == "nearest")


def _snapkv(config: Retention) -> Claims:
    """Pooling lends a broken key the attention of its neighbours."""
    assert isinstance(config, snapkv.Config)
    return Claims(
        score=score_snapkv,
        ties_exactly=config.kernel == 1 or config.pooling == "max",
        needs_queries=True,
        split_invariant=config.cadence == "token",
        rows_independent=config.shared_heads == 1,
        scores_keys=True,
        block_without_loop=config.cadence == "block",
        nan_is_weak=config.shared_heads == 1 and config.kernel == 1,
    )


def _tova(config: Retention) -> Claims:
    assert isinstance(config, tova.Config)
    return Claims(
        score=score_tova,
        ties_exactly=True,
        needs_queries=True,
        takes_attention=True,
        split_invariant=config.cadence == "token",
        rows_independent=config.shared_heads == 1,
        scores_keys=True,
        block_without_loop=config.cadence == "block",
        nan_is_weak=config.shared_heads == 1,
    )


def _pyramidkv(config: Retention) -> Claims:
    assert isinstance(config, pyramidkv.Config)
    return replace(claims_for(config.scorer), score=score_pyramidkv)


def _knorm(config: Retention) -> Claims:
    """Path independent whatever `recent` is: a token competes once, when it leaves the recent window."""
    assert isinstance(config, knorm.Config)
    alone = config.shared_heads == 1
    return Claims(
        takes_queries=False,
        score=score_knorm,
        split_invariant=True,
        worth=(_low_norm if config.keep == "low" else _high_norm) if alone else None,
        budgets_nest=True,
        exact=True,
        rows_independent=alone,
        block_without_loop=config.cadence == "block",
        nan_is_weak=True,
    )


def _streaming_llm(config: Retention) -> Claims:
    return Claims(
        takes_queries=False,
        score=score_streaming_llm,
        split_invariant=True,
        worth=_age,
        budgets_nest=True,
        content_independent=True,
        exact=True,
        rows_independent=config.shared_heads == 1,
        block_without_loop=config.cadence == "block",
    )


CLAIMS: dict[type[Retention], Callable[[Retention], Claims]] = {
    cam.Config: _cam,
    h2o.Config: _h2o,
    keyformer.Config: _keyformer,
    knorm.Config: _knorm,
    pyramidkv.Config: _pyramidkv,
    snapkv.Config: _snapkv,
    streaming_llm.Config: _streaming_llm,
    tova.Config: _tova,
}


def claims_for(config: Retention) -> Claims:
    """The claims of a method of this package; a config of another type promises the universal laws alone."""
    stated = CLAIMS.get(type(config))
    claims = Claims(needs_queries=config.needs_queries) if stated is None else stated(config)
    if isinstance(config.placement, Absolute):
        return claims
    # How a block is grouped says where its keys were rotated: the same numbers in other blocks are other keys.
    return replace(
        claims,
        turns_keys=True,
        split_invariant=claims.split_invariant and not claims.scores_keys,
    )
