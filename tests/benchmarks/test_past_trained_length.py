"""Running past the trained length, at a size of seconds: the cached decoder is the model, positions stay in range."""

import json
import math

import mlx.core as mx
import past_trained_length as bench
import pytest

import veloxfn
from veloxfn.placement import Contiguous

TINY = bench.Plan(length=16, budget=12, stretches=4, layers=2, steps=12, batch=4)


@pytest.fixture(scope="module")
def trained():
    training, held_out = bench.texts(TINY)
    model = bench.train(TINY, training)
    return model, held_out, bench.measure(model, TINY, held_out)


def test_held_out_bytes_are_not_trained_on():
    training, held_out = bench.texts(TINY)
    assert held_out.shape == (6, 1 + TINY.read)
    assert held_out[:, 0].tolist() == [bench.START] * 6
    sizes = [len(path.read_bytes()) - TINY.read for path in sorted(bench.TEXTS.glob("*.txt"))]
    assert training.size == sum(sizes)
    assert bench.START not in training.tolist()


@pytest.mark.parametrize("name", bench.methods(TINY))
def test_below_the_budget_every_cache_is_the_model(trained, name):
    model, held_out, _ = trained
    seen = held_out[:, : TINY.budget + 1]  # nothing is lost before the last of them has attended
    logits, _ = bench.read(model, bench.methods(TINY)[name], seen)
    assert mx.allclose(logits, model(seen), atol=1e-4).item()


def test_contiguous_placement_never_leaves_the_trained_length(trained):
    for plan in (TINY, bench.FULL, bench.QUICK):
        assert plan.budget < plan.length < plan.read
    for name, policy in bench.methods(TINY).items():
        state = policy.init_state(2, bench.HEAD_DIM, dtype=mx.float32)
        x = mx.random.normal((2, 40, bench.HEAD_DIM), key=mx.random.key(1))
        evidence = {"queries": x[:, None]} if policy.config.needs_queries else {}
        state = policy.update_batched(state, x, x, **evidence)
        expected = TINY.budget if isinstance(policy.config.placement, Contiguous) else 40
        assert veloxfn.next_position(policy.config, state).tolist() == [expected] * 2, name


def test_without_sinks_a_windows_placement_does_not_matter(trained):
    # Attention depends on distances only, and a window has no gaps.
    nats = {result.method: result.nats for result in trained[2]}
    gapless, counting = nats["sliding window, contiguous"], nats["sliding window, absolute"]
    for a, b in zip(gapless, counting, strict=True):
        assert a == pytest.approx(b, abs=2e-3)
    assert nats["streaming_llm, contiguous"] != nats["sliding window, contiguous"]


def test_figures_are_finite_and_json(trained):
    told = json.loads(json.dumps(bench.report(trained[2], TINY, 1), allow_nan=False))
    assert [entry["method"] for entry in told["results"]] == [bench.FULL_CACHE, *bench.methods(TINY)]
    for entry in told["results"]:
        assert len(entry["perplexity"]) == TINY.stretches
        assert all(1 < value < 256**2 for value in entry["perplexity"])
        interval = entry["excess_nats"]
        assert interval["low"] <= interval["value"] <= interval["high"]
    positions = {entry["method"]: entry["highest_position"] for entry in told["results"]}
    assert positions["streaming_llm, contiguous"] == TINY.budget < TINY.length
    assert positions[bench.FULL_CACHE] == TINY.read - 1


def test_contiguous_sinks_stay_flat_where_the_full_cache_degrades(tmp_path):
    """Quick mode: trained on 32 bytes, read to 512."""
    bench.main(["--quick", "--json", str(tmp_path / "figures.json")])
    told = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    ratio = {entry["method"]: entry["late"] / entry["perplexity"][0] for entry in told["results"]}
    last = {entry["method"]: entry["perplexity"][-1] for entry in told["results"]}
    assert ratio[bench.FULL_CACHE] > 1.5
    for method in ("streaming_llm, contiguous", "h2o, contiguous"):
        assert ratio[method] < 1.1
        assert last[method] < last["streaming_llm, absolute"] < last[bench.FULL_CACHE]


def test_perplexity_by_hand():
    result = bench.Result("x", [[0.0, math.log(4), math.log(2)], [math.log(9), 0.0, math.log(2)]], 3)
    assert result.perplexity == pytest.approx([3.0, 2.0, 2.0])
    assert result.late == pytest.approx(2.0)


def test_the_table_and_the_figure(trained, tmp_path, capsys):
    bench.tabulate(trained[2], TINY)
    assert capsys.readouterr().out.count("\n") == 2 + len(trained[2])
    pytest.importorskip("matplotlib")
    bench.plot(trained[2], TINY, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nonsense_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--steps", "0"])
    assert "--steps must be >= 1, got 0" in capsys.readouterr().err
