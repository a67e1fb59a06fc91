"""The reference against cases worked out by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxfn import budgets, cam, draws, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova
from veloxfn.placement import Contiguous, Rope
from veloxfn.testing import MARGIN, Oracle, Stream, fingerprint, laws, normal_stream, replay
from veloxfn.testing.oracle import Row, Token, Verdict, choose, dealt, temperature, turned
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


def test_keyformer_without_noise_by_hand() -> None:
    """At tau = 1/2 the weights of 0 and log 3 are (1/10, 9/10)."""
    stream = one_row([0.0, LOG3], [0.0, 1.0])
    assert masses(keyformer.Config(budget=8, noise="none", tau=0.5), stream) == pytest.approx([1.1, 0.9])
    annealed = keyformer.Config(budget=8, noise="none", tau_init=1.0, tau_end=0.5, anneal_steps=1)
    assert masses(annealed, stream) == pytest.approx([1.1, 0.9])
    late = keyformer.Config(budget=8, noise="none", tau_init=1.0, tau_end=0.5, anneal_steps=1, anneal_from=1)
    assert masses(late, stream) == pytest.approx([1.25, 0.75])


def test_keyformer_logit_noise_by_hand() -> None:
    """Query 1 of head 0 in stream 0 gets the draws of (seed, 0, 0, 1) at positions 0 and 1."""
    config = keyformer.Config(budget=8, noise="logit", tau=2.0, seed=9)
    named = draws.names(9, mx.array(0), mx.array(0), mx.array(1))
    zeta = np.array(draws.hashed_gumbel(named, mx.array([0, 1], mx.int32))).astype(float)
    powers = np.exp((np.array([0.0, LOG3]) + zeta) / 2)
    expected = powers / powers.sum() + [1, 0]
    assert masses(config, one_row([0.0, LOG3], [0.0, 1.0])) == pytest.approx(expected.tolist())


def test_keyformer_additive_noise_by_hand() -> None:
    """The mass stays h2o's; what is ranked has tau times the token's own draw."""
    config = keyformer.Config(budget=8, noise="additive", tau_init=1.0, tau_end=3.0, anneal_steps=2, seed=4)
    stream = one_row([0.0, LOG3], [0.0, 1.0], [2])
    oracle = Oracle(config, 1, names=[5])
    (verdict,) = oracle.absorb(stream.keys.astype(float), stream.queries.astype(float), stream.valid)
    noise = np.array(draws.gumbel(4, mx.array([5], mx.uint32), mx.array([[0, 1]], mx.int32)))[0]
    assert [token.mass for token in oracle.rows[0].tokens] == pytest.approx([1.25, 0.75])
    assert verdict.importance == pytest.approx((np.array([1.25, 0.75]) + 2.0 * noise).tolist())


def test_temperature_by_hand() -> None:
    config = keyformer.Config(tau_init=1.0, tau_end=3.0, anneal_steps=4)
    assert [temperature(config, time) for time in (0, 1, 2, 4, 8)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    assert temperature(keyformer.Config(tau_init=1.0, tau_end=3.0, anneal_steps=0), 5) == 1.0
    assert temperature(keyformer.Config(tau=0.25), 5) == 0.25


def importance(config, stream: Stream) -> list[float]:
    """What every token of the first row is worth, all blocks absorbed and nothing lost."""
    oracle = Oracle(config, 1)
    verdict, first = None, 0
    for size in stream.blocks:
        part = slice(first, first + size)
        (verdict,) = oracle.absorb(
            stream.keys[:, part].astype(float), stream.queries[:, :, part].astype(float), stream.valid[:, part]
        )
        first += size
    return verdict.importance


def test_tova_by_hand() -> None:
    """The last query alone, its heads averaged."""
    assert importance(tova.Config(budget=8), one_row([0.0, LOG3], [5.0, 1.0])) == pytest.approx([1 / 4, 3 / 4])
    heads = one_row([0.0, LOG3], [[5.0, 1.0], [5.0, 0.0]], [2])
    assert importance(tova.Config(budget=8), heads) == pytest.approx([3 / 8, 5 / 8])


def test_snapkv_by_hand() -> None:
    """Queries 0 see (1/2, 1/2), (1/3, ..), (1/4, ..): the window's last two average to 7/24 for each past slot."""
    stream = one_row([0.0] * 4)
    for blocks in ([4], [1] * 4, [2, 2], [3, 1]):
        found = importance(snapkv.Config(budget=8, window=2, kernel=1), stream.regrouped(blocks))
        assert found == pytest.approx([7 / 24, 7 / 24, math.inf, math.inf])


def test_snapkv_pools_by_hand() -> None:
    """Query 4 sees weights (1, 3, 3, 1, 1) / 9: edges divide by what is there, the window's slot is not pooled."""
    stream = one_row([0.0, LOG3, LOG3, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0])
    pooled = {"mean": [2 / 9, 7 / 27, 7 / 27, 2 / 9], "max": [3 / 9, 3 / 9, 3 / 9, 3 / 9]}
    for pooling, expected in pooled.items():
        config = snapkv.Config(budget=8, window=1, kernel=3, pooling=pooling)
        assert importance(config, stream) == pytest.approx([*expected, math.inf])
    assert importance(snapkv.Config(budget=8, window=1, kernel=7), stream)[:4] == pytest.approx([2 / 9] * 4)


def test_pyramidkv_is_judged_by_its_scorer() -> None:
    stream = one_row([0.0, LOG3, 1.0], [5.0, 1.0, 1.0])
    scorer = h2o.Config(budget=2, sink=0, recent=1)
    assert replay(pyramidkv.Config(layers=4, scorer=scorer), stream)[0] == replay(scorer, stream)[0]


def merged(config: cam.Config, keys, values, lost: int, masses=None) -> list[Token]:
    """The survivors once the token `lost` is gone; D = len(key), Dv = 1."""
    oracle = Oracle(config, 1)
    tokens = [
        Token(p, np.array(k, float), np.array([v], float)) for p, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    for token, mass in zip(tokens, masses or [1.0] * len(tokens), strict=True):
        token.mass = mass
    oracle.rows[0] = Row(tokens, len(tokens))
    oracle.settle([[p for p in range(len(keys)) if p != lost]])
    return oracle.rows[0].tokens


LINE = [[1.0, 0.0]] * 4


def numbers(tokens: list[Token]) -> list[float]:
    return [token.value.item() for token in tokens]


def test_cam_window_by_hand() -> None:
    """Value 6 of position 1 goes to positions 2 and 3, in halves: 8 + 3 and 2 + 3, or over 1.5 if normalised."""
    shared = {"budget": 3, "sink": 0, "gate": False}
    sums = cam.Config(**shared, normalise=False, cadence="token")
    assert numbers(merged(sums, LINE, [5, 6, 8, 2], 1)) == [5, 11, 5]
    assert numbers(merged(cam.Config(**shared), LINE, [5, 6, 8, 2], 1)) == pytest.approx([5, 11 / 1.5, 5 / 1.5])
    assert numbers(merged(cam.Config(**shared, target_count=1), LINE, [5, 6, 8, 2], 1)) == [5, 7, 2]
    assert numbers(merged(cam.Config(**shared), LINE, [5, 6, 8, 2], 3)) == [5, 6, 8]
    assert numbers(merged(cam.Config(**shared, merge="off"), LINE, [5, 6, 8, 2], 1)) == [5, 8, 2]


def test_cam_nearest_by_hand() -> None:
    """The key (4, 3) is at cosines 0.8 and 0.6 from the axes: value 6 goes to the first, with its mass."""
    keys = [[4.0, 3.0], [1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]
    shared = {"budget": 3, "sink": 0, "gate": False, "targets": "nearest"}
    mean = merged(cam.Config(**shared, merge="mean"), keys, [6, 1, 2, 3], 0, [0.5, 1.0, 2.0, 4.0])
    assert numbers(mean) == [3.5, 2, 3]
    assert [token.mass for token in mean] == [1.5, 2.0, 4.0]
    similar = merged(cam.Config(**shared, merge="similarity"), keys, [6, 1, 2, 3], 0)
    assert numbers(similar) == pytest.approx([0.2 * 1 + 0.8 * 6, 2, 3])
    keyed = merged(cam.Config(**shared, merge="mean", merge_keys=True), keys, [6, 1, 2, 3], 0)
    assert [token.key.tolist() for token in keyed] == [[2.5, 1.5], [0.0, 2.0], [-1.0, 0.0]]
    sunk = merged(cam.Config(**(shared | {"sink": 2}), merge="mean"), keys, [6, 1, 2, 3], 0)
    assert numbers(sunk) == [1, 4, 3]


def test_cam_gate_by_hand() -> None:
    """Mass 1 against a mean of 4 opens where the draw of (seed, stream, position) is below 1/4; mass 0 never."""
    opened = []
    for seed in range(40):
        config = cam.Config(budget=3, sink=0, seed=seed, target_count=1)
        draw = float(np.array(draws.uniform(seed, mx.array([0], mx.uint32), mx.array([[1]], mx.int32))).item())
        found = numbers(merged(config, LINE, [5, 6, 8, 2], 1, [9.0, 1.0, 4.0, 9.0]))
        assert found == ([5, 7, 2] if draw < 0.25 else [5, 8, 2])
        opened.append(draw < 0.25)
        assert numbers(merged(config, LINE, [5, 6, 8, 2], 1, [9.0, 0.0, 0.0, 9.0])) == [5, 8, 2]
        assert numbers(merged(config, LINE, [5, 6, 8, 2], 1, [9.0, 1.0, 0.0, 9.0])) == [5, 7, 2]
        assert numbers(merged(config, LINE, [5, 6, 8, 2], 1, [9.0, 4.0, 1.0, 9.0])) == [5, 7, 2]
    assert len(set(opened)) == 2


def test_equally_near_targets_are_left_open() -> None:
    """Rounding decides between equal keys: the oracle says so and follows the library."""
    config = cam.Config(budget=3, sink=0, gate=False, targets="nearest", merge="mean")
    assert [token.allowance for token in merged(config, LINE, [6, 1, 2, 3], 0)] == [math.inf] * 3


def test_rotations_by_hand() -> None:
    """A quarter turn of the first pair; the other dimensions stay."""
    quarter = Rope(dims=2, freqs=(2 / math.pi,))
    assert turned(quarter, np.array([1.0, 0.0, 7.0]), 1) == pytest.approx([0.0, 1.0, 7.0])
    halves = Rope(dims=4, freqs=(2 / math.pi, 1 / math.pi))
    assert turned(halves, np.array([1.0, 2.0, 0.0, 0.0]), 1) == pytest.approx([0.0, -2.0, 1.0, 0.0])
    pairs = Rope(dims=4, freqs=(2 / math.pi, 1 / math.pi), traditional=True)
    assert turned(pairs, np.array([1.0, 0.0, 2.0, 0.0]), 1) == pytest.approx([0.0, 1.0, -2.0, 0.0])
    based = Rope(dims=4, base=100.0, scale=0.5)
    angle = 3 * 0.5 / 10
    assert turned(based, np.array([0.0, 1.0, 0.0, 0.0]), 3) == pytest.approx(
        [0.0, math.cos(angle), 0.0, math.sin(angle)]
    )


def test_survivors_are_seen_at_their_ranks() -> None:
    """Once token 0 is gone, token 1 (rotated at 1) is seen at rank 0, a quarter turn back."""
    config = tova.Config(budget=2, placement=Contiguous(Rope(dims=2, freqs=(2 / math.pi,))))
    oracle = Oracle(config, 1)
    keys, queries = np.array([[[9.0, 0.0], [0.0, 1.0]]]), np.zeros((1, 1, 2, 2))
    oracle.absorb(keys, queries, np.ones((1, 2), dtype=np.bool_))
    oracle.settle([[1]])
    asked = np.array([[[[math.sqrt(2) * LOG3, 0.0]]]])
    (verdict,) = oracle.absorb(np.zeros((1, 1, 2)), asked, np.ones((1, 1), dtype=np.bool_))
    assert [token.rotation for token in oracle.rows[0].tokens] == [1, 1]
    assert verdict.importance == pytest.approx([3 / 4, 1 / 4])


def test_budgets_dealt_by_hand() -> None:
    """Shares 8 and 4 over a floor of 1; a taper's shares 9, 3, -3 become 6.75, 2.25, 0."""
    assert dealt(2, 7, 1, beta=1.5) == [9, 5]
    assert dealt(3, 5, 1, beta=1) == [5, 5, 5]
    assert dealt(1, 9, 2, taper=1.75) == [9]
    assert dealt(3, 4, 1, taper=3) == [8, 3, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda layers, mean, **more: (mean + 1,) * layers,
        lambda layers, mean, **more: (mean - 1, *(mean,) * (layers - 2), mean + 1),
        lambda layers, mean, *, floor, **more: (
            (layers * mean - (layers - 1) * (floor - 1),) + (floor - 1,) * (layers - 1)
        ),
        lambda layers, mean, **more: (mean + mean % 2, *(mean,) * (layers - 2), mean - mean % 2),
        lambda layers, mean, **more: (mean,) * layers,
    ],
    ids=["drifts", "rises", "below the floor", "not monotone", "ignores the shape"],
)
def test_the_law_of_pyramids_catches_wrong_budgets(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    laws.law_pyramid(4, 11, 3, beta=2.0)
    monkeypatch.setattr(budgets, "pyramid", wrong)
    with pytest.raises(AssertionError, match="pyramid"):
        laws.law_pyramid(4, 11, 3, beta=2.0)


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
