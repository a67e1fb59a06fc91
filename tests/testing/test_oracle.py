"""The reference against cases worked out by hand."""

import math

import numpy as np
import pytest

from veloxfn import h2o, knorm, streaming_llm
from veloxfn.testing import MARGIN, Oracle, Stream, fingerprint, normal_stream, replay
from veloxfn.testing.oracle import Row, Token, Verdict, choose
from veloxfn.testing.streams import split

LOG3 = math.log(3.0)


def one_row(keys, queries=None, blocks=None) -> Stream:
    """One row with D = 1; G query heads where `queries` is a list of lists."""
    tokens = len(keys)
    asking = np.zeros((1, tokens)) if queries is None else np.atleast_2d(queries)
    return Stream(
        keys=np.asarray(keys, dtype=np.float32)[None, :, None],
        values=fingerprint(1, tokens, 3),
        queries=asking.astype(np.float32)[None, :, :, None],
        valid=np.ones((1, tokens), dtype=np.bool_),
        blocks=split(tokens, 1) if blocks is None else tuple(blocks),
    )


def masses(config, stream: Stream) -> list[float]:
    """The masses after all blocks, nothing lost."""
    oracle = Oracle(config, 1)
    first = 0
    for size in stream.blocks:
        part = slice(first, first + size)
        oracle.absorb(
            stream.keys[:, part].astype(float), stream.queries[:, :, part].astype(float), stream.valid[:, part]
        )
        first += size
    return [token.mass for token in oracle.rows[0].tokens]


def test_h2o_mass_by_hand() -> None:
    """Query 1 sees keys 0 and log 3 with weights 1/4 and 3/4; query 0 sees only itself."""
    stream = one_row([0.0, LOG3], [0.0, 1.0])
    assert masses(h2o.Config(budget=8), stream) == pytest.approx([1.25, 0.75])
    assert masses(h2o.Config(budget=8), stream.regrouped([2])) == pytest.approx([1.25, 0.75])


def test_h2o_decay_by_hand() -> None:
    stream = one_row([0.0, LOG3], [0.0, 1.0])
    assert masses(h2o.Config(budget=8, decay=0.5), stream) == pytest.approx([0.75, 0.75])
    assert masses(h2o.Config(budget=8, decay=0.0), stream) == pytest.approx([0.25, 0.75])


def test_h2o_averages_heads_by_hand() -> None:
    """Head 0 weighs (1/4, 3/4), head 1 weighs (1/2, 1/2)."""
    stream = one_row([0.0, LOG3], [[0.0, 1.0], [0.0, 0.0]])
    assert masses(h2o.Config(budget=8), stream) == pytest.approx([1 + 3 / 8, 5 / 8])


def test_h2o_scales_by_the_key_dimension() -> None:
    """D = 4 halves the scores: q . k = 2 log 3 counts as log 3."""
    keys = np.zeros((1, 2, 4), dtype=np.float32)
    keys[0, 1, 0] = 2 * LOG3
    queries = np.ones((1, 1, 2, 4), dtype=np.float32)
    stream = Stream(keys, fingerprint(1, 2, 3), queries, np.ones((1, 2), dtype=np.bool_), (2,))
    assert masses(h2o.Config(budget=8), stream) == pytest.approx([1.25, 0.75])


def test_h2o_key_proxy_by_hand() -> None:
    """The first token starts at 1; each later key asks the older ones and starts at 0 itself."""
    config = h2o.Config(budget=8, query_source="key_proxy")
    assert masses(config, one_row([0.0, LOG3, 1.0])) == pytest.approx([1 + 1 + 1 / 4, 3 / 4, 0.0])
    assert masses(config, one_row([0.0, LOG3, 1.0], blocks=[1, 2])) == pytest.approx([2.25, 0.75, 0.0])


def test_h2o_age_normalised_by_hand() -> None:
    """Mass (1.25, 0.75) over ages (2, 1) ranks the newer first."""
    config = h2o.Config(budget=1, sink=0, recent=0)
    stream = one_row([0.0, LOG3], [0.0, 1.0])
    assert replay(config, stream)[0] == [[0]]
    assert replay(h2o.Config(budget=1, sink=0, recent=0, age_normalised=True), stream)[0] == [[1]]


def test_knorm_by_hand() -> None:
    """Norms 3, 1, 2, 1 at budget 2: the two ones low, 3 and 2 high; ties lose the oldest."""
    stream = one_row([3.0, -1.0, 2.0, 1.0])
    assert replay(knorm.Config(budget=2, sink=0), stream)[0] == [[1, 3]]
    assert replay(knorm.Config(budget=1, sink=0), stream)[0] == [[3]]
    assert replay(knorm.Config(budget=2, sink=0, keep="high"), stream)[0] == [[0, 2]]
    assert replay(knorm.Config(budget=2, sink=1), stream)[0] == [[0, 3]]
    assert replay(knorm.Config(budget=3, sink=0, recent=2), stream)[0] == [[1, 2, 3]]


def test_streaming_llm_by_hand() -> None:
    stream = one_row([0.0] * 7)
    assert replay(streaming_llm.Config(budget=4, sink=2), stream)[0] == [[0, 1, 5, 6]]
    assert replay(streaming_llm.Config(budget=3, sink=0), stream.regrouped([7]))[0] == [[4, 5, 6]]


def test_padded_arrivals_are_not_counted() -> None:
    stream = one_row([5.0, 1.0, 5.0, 2.0])
    stream.valid[0, [0, 2]] = False
    oracle = Oracle(streaming_llm.Config(budget=4, sink=0), 1)
    (verdict,) = oracle.absorb(stream.keys.astype(float), stream.queries.astype(float), stream.valid)
    assert verdict.positions == [0, 1]
    assert [token.key.tolist() for token in oracle.rows[0].tokens] == [[1.0], [2.0]]


def test_shared_heads_average_importance() -> None:
    """Norms (1, 4) and (4, 2) average to (2.5, 3): both rows keep token 0."""
    stream = normal_stream(rows=2, tokens=2, key_dim=1, value_dim=3, blocks=(2,))
    stream.keys[:, :, 0] = [[1, 4], [4, 2]]
    assert replay(knorm.Config(budget=1, sink=0), stream)[0] == [[0], [1]]
    assert replay(knorm.Config(budget=1, sink=0, shared_heads=2), stream)[0] == [[0], [0]]


def row_of(*positions: int, seen: int = 10) -> Row:
    return Row([Token(position, np.zeros(1)) for position in positions], seen)


def test_ranking_by_hand() -> None:
    """Protected last, NaN first, then importance, then age."""
    config = knorm.Config(budget=3, sink=1, recent=1)
    row = row_of(0, 3, 5, 7, 9)
    assert choose(config, row, [0.0, 1.0, 1.0, 2.0, 0.0]).lost == [3, 5]
    assert choose(config, row, [0.0, 2.0, 1.0, 1.0, 0.0]).lost == [5, 7]
    assert choose(config, row, [math.nan, 2.0, math.inf, math.nan, math.nan]).lost == [3, 7]
    assert choose(config, row, [-math.inf, math.inf, math.inf, math.inf, -math.inf]).lost == [3, 5]
    assert choose(config, row, [0.0, 1.0, 1.0, 2.0, 0.0]).survivors == [0, 7, 9]


def test_slack_is_the_relative_margin_of_the_decision() -> None:
    config = knorm.Config(budget=2, sink=0)
    assert choose(config, row_of(1, 2, 3), [4.0, 5.0, 8.0]).slack == pytest.approx(0.2)
    assert choose(config, row_of(1, 2, 3), [4.0, 4.0, 8.0]).slack == 0.0
    assert choose(config, row_of(1, 2), [4.0, 5.0]).slack == math.inf


def test_verdict_accepts_what_is_within_the_margin_only() -> None:
    near = Verdict([0, 1, 2], [1.0, 1.0 + MARGIN / 2, 2.0], [False] * 3, [0], MARGIN / 2)
    near.judge([1, 2])
    near.judge([0, 2])
    with pytest.raises(AssertionError, match="expected exactly"):
        near.judge([0, 2], exact=True)
    far = Verdict([0, 1, 2], [1.0, 1.1, 2.0], [False] * 3, [0], 0.1)
    with pytest.raises(AssertionError, match="while 1 stayed"):
        far.judge([0, 2])
    with pytest.raises(AssertionError, match="had to go"):
        far.judge([0, 1, 2])
    with pytest.raises(AssertionError, match="not among"):
        far.judge([1, 7])
    shielded = Verdict([0, 1], [0.0, 1.0], [True, False], [1], math.inf)
    with pytest.raises(AssertionError, match="protected"):
        shielded.judge([1])
    broken = Verdict([0, 1], [math.nan, 1.0], [False, False], [0], math.inf)
    with pytest.raises(AssertionError, match="NaN saved"):
        broken.judge([0])


def test_infinite_importance_is_judged() -> None:
    verdict = Verdict([0, 1, 2], [math.inf, math.inf, -math.inf], [False] * 3, [2], math.inf)
    verdict.judge([0, 1])
    with pytest.raises(AssertionError):
        verdict.judge([1, 2])
