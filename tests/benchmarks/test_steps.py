"""The benchmark's own logic: the sides do the same job, eviction happens, figures are put together rightly."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
import sides
import steps
import timing
from sides import Shape

import veloxfn
from veloxfn import cam, h2o, keyformer, knorm, streaming_llm

SMALL = Shape(rows=2, dim=8, budget=24)
needs_peer = pytest.mark.skipif(not sides.HAS_PEER, reason="the peer veloxquant-mlx is not installed")


def tiny_h2o(**settings):
    return h2o.Config(**{"budget": SMALL.budget, "sink": 2, "recent": 4, "decay": 0.98, **settings})


def advance(stream, calls=5):
    for _ in range(calls):
        stream()
    stream.check(SMALL.budget)


def test_turns_alternate_and_warmup_is_not_timed():
    order = []
    seconds = timing.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, calls=2, warmup=1
    )
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert {name: len(figures) for name, figures in seconds.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_round_by_round():
    # A machine that is 10 times slower in one round changes both sides, not their ratio.
    assert timing.ratio([4.0, 40.0, 4.4], [1.0, 10.0, 1.1]) == pytest.approx((4.0, 4.0, 4.0, 4.0))
    assert timing.ratio([4.0, 6.0, 8.0], [2.0, 2.0, 1.0]) == (3.0, 2.5, 5.5, 4.0)
    assert timing.spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 1.5, 2.5)
    assert timing.ratio([3.0], [2.0]) == (1.5, 1.5, 1.5, 1.5)


@pytest.mark.parametrize("evidence", ["queries", "attention"])
@pytest.mark.parametrize("dtype", steps.DTYPES)
def test_our_h2o_stream_evicts(evidence, dtype):
    stream = sides.ours(tiny_h2o(), SMALL, steps.DTYPES[dtype], evidence=evidence)
    before = int(veloxfn.tokens_seen(stream.state)[0])
    advance(stream)
    assert veloxfn.tokens_seen(stream.state).tolist() == [before + 5] * SMALL.rows
    assert stream.state.slots.keys.dtype == steps.DTYPES[dtype]


def test_a_prompt_starts_from_an_empty_cache_each_time():
    stream = sides.ours(tiny_h2o(), SMALL, mx.float32, evidence="queries", tokens=40, compiled=False, empty=True)
    advance(stream)
    assert veloxfn.tokens_seen(stream.state).tolist() == [40] * SMALL.rows


def test_a_run_without_eviction_is_refused():
    stream = sides.ours(tiny_h2o(), SMALL, mx.float32, evidence="queries", tokens=8, compiled=False, empty=True)
    stream()
    with pytest.raises(RuntimeError, match="no eviction took place: kept 8, seen 8, budget 24"):
        stream.check(SMALL.budget)


def test_a_second_trace_is_refused():
    step = sides.Traced(lambda x: x + 1)
    step(mx.zeros(3))
    with pytest.raises(RuntimeError, match="traced again"):
        step(mx.zeros(4))


@needs_peer
def test_with_keys_as_queries_the_peer_keeps_the_same_rows():
    config = tiny_h2o(query_source="key_proxy", cadence="token")
    ours = sides.ours(config, SMALL, mx.float32, compiled=False)
    peer = sides.peer_h2o(SMALL, mx.float32, sink=2, recent=4, decay=0.98)
    for stream in (ours, peer):
        advance(stream, calls=60)
    order = mx.argsort(ours.state.slots.positions, axis=1)[:, 1:]
    assert veloxfn.kept_positions(ours.state).tolist() == peer.state[3].tolist()
    assert mx.allclose(mx.take_along_axis(ours.state.mass, order, axis=1), peer.state[2], rtol=1e-4).item()
    for mine, theirs in zip(h2o.get_kv(config, ours.state), peer.state[:2], strict=True):
        assert mx.array_equal(mine, theirs).item()


@needs_peer
@pytest.mark.parametrize("options", [{"compiled": False}, {"compiled": True}, {"compiled": False, "empty": True}])
def test_the_peers_block_forms_evict(options):
    advance(sides.peer_h2o(SMALL, mx.float32, sink=2, recent=4, decay=0.98, tokens=70, **options), calls=2)


@needs_peer
@pytest.mark.parametrize("tokens", [1, 40])
def test_knorm_and_the_peer_keep_the_same_rows(tokens):
    ours = sides.ours(knorm.Config(budget=SMALL.budget, sink=2), SMALL, mx.float32, tokens=tokens)
    peer = sides.peer_knorm(SMALL, mx.float32, sink=2, tokens=tokens)
    for stream in (ours, peer):
        advance(stream, calls=40)
    policy = veloxfn.policy(knorm.Config(budget=SMALL.budget, sink=2))
    for mine, theirs in zip(policy.get_kv(ours.state), peer.state[:2], strict=True):
        assert mx.array_equal(mine, theirs).item()


@needs_peer
def test_keyformer_without_temperature_and_the_peer_keep_the_same_rows():
    settings = {"recent": 4, "tau_init": 0.0, "tau_end": 0.0, "anneal_steps": 8}
    config = keyformer.Config(budget=SMALL.budget, sink=2, noise="additive", query_source="key_proxy", **settings)
    ours = sides.ours(replace(config, cadence="token"), SMALL, mx.float32, compiled=False)
    peer = sides.peer_keyformer(SMALL, mx.float32, sink=2, **settings)
    for stream in (ours, peer):
        advance(stream, calls=40)
    assert mx.array_equal(keyformer.get_kv(config, ours.state)[1], peer.state[1]).item()


@needs_peer
def test_cam_into_the_nearest_and_the_peer_merge_the_same_rows():
    config = cam.Config(
        budget=SMALL.budget,
        sink=2,
        recent=0,
        targets="nearest",
        merge="similarity",
        gate=False,
        query_source="key_proxy",
        cadence="token",
    )
    ours = sides.ours(config, SMALL, mx.float32, compiled=False)
    peer = sides.peer_cam(SMALL, mx.float32, sink=2, merge="sim_weighted", gate=False)
    for stream in (ours, peer):
        advance(stream, calls=40)
    assert mx.allclose(cam.get_kv(config, ours.state)[1].sum(axis=1), peer.state[1].sum(axis=1), atol=1e-3).item()


@needs_peer
def test_the_peers_other_methods_evict():
    advance(sides.peer_keyformer(SMALL, mx.float32, sink=2, recent=4, tau_init=1.0, tau_end=2.0, anneal_steps=9), 20)
    advance(sides.peer_cam(SMALL, mx.float32, sink=2, merge="sim_weighted", gate=True), calls=20)
    advance(sides.peer_tova(SMALL, mx.float32, sink=2), calls=20)


def test_the_copying_design_keeps_what_streaming_llm_keeps():
    ours = sides.ours(streaming_llm.Config(budget=SMALL.budget, sink=2), SMALL, mx.float32)
    copying = sides.gathering(SMALL, mx.float32, sink=2)
    for stream in (ours, copying):
        advance(stream, calls=40)
    keys, values = veloxfn.policy(streaming_llm.Config(budget=SMALL.budget, sink=2)).get_kv(ours.state)
    assert mx.array_equal(keys[:, 2:], copying.state[0][:, 2:]).item()  # the sinks come from prompts of two lengths
    assert mx.array_equal(values[:, 2:], copying.state[1][:, 2:]).item()


def test_the_fastest_form_of_the_other_side_counts(monkeypatch):
    times = {"mine": [1.0, 2.0], "peer": [4.0, 6.0], "peer, other form": [3.0, 8.0]}
    monkeypatch.setattr(timing, "interleave", lambda *_, **__: times)

    class Still:
        def check(self, budget):
            assert budget == SMALL.budget

    rows = list(
        steps.compare(
            "case",
            dict.fromkeys(times, Still),
            against="peer",
            shape=SMALL,
            dtype="float32",
            effort=steps.QUICK,
            targets={"mine": (steps.AT_LEAST, 3.5)},
        )
    )
    assert [row.case for row in rows] == ["case, mine"]
    assert rows[0].value.median == 3.0
    assert rows[0].met is False
    assert "MISSED" in steps.line(rows[0])


def test_the_report_is_json_with_machine_and_targets():
    ratio = timing.Ratio(4.2, 4.0, 4.5, 4.4)
    row = steps.Row("case, queries", {"tokens": 1, "dtype": "float32"}, ratio, "x", (steps.AT_LEAST, 4.0))
    small = steps.Row("extra", {"tokens": 1, "dtype": "float32"}, 3.0, "MiB", (steps.AT_MOST, 2.0))
    told = json.loads(json.dumps(steps.report([row, small])))
    assert told["rows"][0]["met"] is True
    assert told["rows"][0]["target"] == ">= 4"
    assert told["rows"][1]["met"] is False
    assert {"device", "versions", "openblas_preloaded"} <= set(told["machine"])


def test_memory_of_a_block_is_seen():
    stream = sides.ours(tiny_h2o(), SMALL, mx.float32, evidence="queries", tokens=64, compiled=False)
    assert steps._peak_above_active(stream) > 0


def test_an_unknown_group_is_refused(capsys):
    with pytest.raises(SystemExit):
        steps.main(["--only", "nothing"])
    assert "names none of" in capsys.readouterr().err
