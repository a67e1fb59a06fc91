"""CaM's rules on made-up streams: what is conserved, which positions stay, what the gate changes."""

import json

import merging
import mlx.core as mx
import pytest


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    path = tmp_path_factory.mktemp("merging") / "figures.json"
    merging.main(["--quick", "--rows", "6", "--json", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    return {(cell["geometry"], cell["rule"], cell["gate"]): cell for cell in told["cells"]}


def test_redundant_tokens_look_like_their_cluster():
    streams = merging.make_streams("redundant", 4)
    keys = streams.keys / mx.linalg.norm(streams.keys, axis=-1, keepdims=True)
    near = mx.sort(keys @ keys.swapaxes(1, 2), axis=2)[:, :, -2]  # the best but for itself
    assert mx.mean(near).item() > 0.85
    keys = merging.make_streams("independent", 4).keys
    keys = keys / mx.linalg.norm(keys, axis=-1, keepdims=True)
    assert mx.mean(mx.sort(keys @ keys.swapaxes(1, 2), axis=2)[:, :, -2]).item() < 0.7


def test_plain_sums_conserve_the_values_while_all_are_merged(cells):
    for geometry in merging.GEOMETRIES:
        assert cells[geometry, "window, plain sum", False]["value_sum"] < 1e-5
        assert cells[geometry, merging.OFF, None]["value_sum"] > 0.3


def test_window_merges_keep_the_positions_of_h2o(cells):
    for (_, rule, _), cell in cells.items():
        if not rule.startswith("nearest"):
            assert cell["same_positions"] == 1.0
    assert cells["redundant", "nearest, mean", False]["same_positions"] < 1.0


def test_every_rule_changes_values_and_the_gate_keeps_some_out(cells):
    for geometry in merging.GEOMETRIES:
        off = cells[geometry, merging.OFF, None]["error"]
        assert all(cells[geometry, rule, gate]["error"] != off for rule in merging.RULES for gate in (True, False))
    gated = [cells["redundant", rule, True]["error"] for rule in merging.RULES]
    assert gated != [cells["redundant", rule, False]["error"] for rule in merging.RULES]


def test_the_figure_is_drawn(cells, tmp_path):
    pytest.importorskip("matplotlib")
    shown = [merging.Cell(*(cell[name] for name in merging.Cell._fields)) for cell in cells.values()]
    merging.plot(shown, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
