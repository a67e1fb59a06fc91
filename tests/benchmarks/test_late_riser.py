"""The late riser: its streams say what the docstring says, greedy loses it, the intervals hold the rates."""

import json

import late_riser
import mlx.core as mx
import pytest
import reporting

TINY = late_riser.Setting(160, 32, "late riser")


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    path = tmp_path_factory.mktemp("late_riser") / "figures.json"
    late_riser.main(["--quick", "--rows", "24", "--json", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["machine"]["device"]
    return {(cell["regime"], cell["method"]): cell for cell in told["cells"]}


def weights(setting):
    """Attention [N, T, T] of the full cache."""
    streams = late_riser.make_streams(setting, 8)
    logits = streams.queries @ streams.keys.swapaxes(1, 2) * late_riser.DIM**-0.5
    return mx.softmax(mx.where(mx.tri(setting.tokens, dtype=mx.bool_), logits, -mx.inf), axis=-1)


@pytest.mark.parametrize(("regime", "least", "most"), [("late riser", 0.05, 0.2), ("stable", 12, 32)])
def test_the_planted_token_reads_as_stated(regime, least, most):
    setting = TINY._replace(regime=regime)
    read, burst = weights(setting), setting.tokens - late_riser.BURST
    ordinary = [j for j in range(40) if j not in (setting.planted, *setting.heavy)]
    early = read[:, 40:burst]
    planted, others = mx.mean(early[:, :, setting.planted]), mx.mean(early[:, :, mx.array(ordinary)])
    assert least < (planted / others).item() < most
    assert 0.75 < mx.mean(read[:, burst:, setting.planted]).item() < 0.85


def test_heavy_tokens_are_apart_from_sinks_and_the_planted_one():
    for tokens, budget in ((256, 32), (512, 64)):
        setting = late_riser.Setting(tokens, budget, "stable")
        heavy = setting.heavy
        assert len(set(heavy)) == budget // 8
        assert setting.planted >= late_riser.SINK
        assert setting.planted < min(heavy) <= max(heavy) < tokens // 2


def test_greedy_loses_the_late_riser_and_keeps_the_stable_token(cells):
    for method in ("h2o", "additive, tau 0"):
        assert cells["late riser", method]["survived"] == 0
        assert cells["stable", method]["survived"] == cells["stable", method]["rows"]
    greedy, without = cells["late riser", "h2o"], cells["late riser", "additive, tau 0"]
    assert {**greedy, "method": ""} == {**without, "method": ""}  # tau 0 is h2o in every figure


def test_noise_and_chance_rescue_some(cells):
    assert cells["late riser", "additive, tau 6"]["survived"] > 0
    assert 0 < cells["late riser", "random"]["survived"] < 24


def test_noise_does_not_help_the_stable_token(cells):
    greedy = cells["stable", "h2o"]["survived"]
    assert all(cell["survived"] <= greedy for (regime, _), cell in cells.items() if regime == "stable")


def test_what_ranks_without_noise_does_as_it_must(cells):
    for method in ("cam", "tova", "snapkv", "streaming_llm"):
        assert cells["late riser", method]["survived"] == 0
    assert cells["stable", "streaming_llm"]["survived"] == 0  # it is old, whatever it reads
    assert cells["stable", "tova"]["survived"] == cells["stable", "tova"]["rows"]


def test_who_holds_the_planted_token_answers_the_burst(cells):
    lost, held = cells["late riser", "h2o"], cells["stable", "h2o"]
    assert lost["error"] > 0.9 > 0.4 > held["error"]


def test_every_method_holds_the_same_bytes(cells):
    for cell in cells.values():
        assert cell["kept_bytes"] == 32 * 2 * late_riser.DIM * 4
        assert cell["full_bytes"] == 256 * 2 * late_riser.DIM * 4
        assert cell["survived"] <= cell["survived_early"]
        assert cell["survival"]["low"] <= cell["survival"]["value"] <= cell["survival"]["high"]


def test_the_figure_is_drawn(cells, tmp_path):
    pytest.importorskip("matplotlib")
    names = late_riser.Cell._fields
    late_riser.plot([late_riser.Cell(*(cell[name] for name in names)) for cell in cells.values()], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_wilson_by_hand():
    assert reporting.wilson(5, 10) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    assert reporting.wilson(0, 10) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert reporting.wilson(10, 10) == pytest.approx((1.0, 0.7225, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="got 3 of 2"):
        reporting.wilson(3, 2)


def test_mean_by_hand():
    assert reporting.mean([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        reporting.mean([1.0])
