"""K-norm's two geometries: an advantage where norms tell, none where they do not."""

import json

import mlx.core as mx
import norms
import pytest


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    path = tmp_path_factory.mktemp("norms") / "figures.json"
    norms.main(["--quick", "--json", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    return {(cell["geometry"], cell["method"]): cell for cell in told["cells"]}


def test_the_planted_keys_are_short_and_read():
    streams = norms.make_streams(norms.PLANTED_GEOMETRY, 8)
    assert streams.planted.sum(axis=1).tolist() == [norms.PLANTED] * 8
    assert not streams.planted[:, : norms.SINK].any().item()
    assert not streams.planted[:, -64:].any().item()
    lengths, read = mx.linalg.norm(streams.keys, axis=-1), mx.mean(norms.weights(streams.probes, streams.keys), axis=1)
    count = norms.PLANTED * 8
    short = mx.where(streams.planted, lengths, 0).sum() / count
    others = mx.where(streams.planted, 0, lengths).sum() / (8 * norms.TOKENS - count)
    assert 0.6 < (short / others).item() < 0.8
    assert (mx.where(streams.planted, read, 0).sum() / 8).item() > 0.5


def test_isotropic_keys_have_nothing_planted():
    streams = norms.make_streams(norms.ISOTROPIC, 8)
    read = mx.mean(norms.weights(streams.probes, streams.keys), axis=1)
    share = (mx.where(streams.planted, read, 0).sum() / 8).item()
    assert share == pytest.approx(norms.PLANTED / norms.TOKENS, rel=0.2)


def test_low_norms_win_where_they_are_planted(cells):
    low, high, random = (
        cells[norms.PLANTED_GEOMETRY, method] for method in ("knorm, keep low", "knorm, keep high", "random")
    )
    assert low["planted_kept"] > 0.9 * norms.PLANTED * low["rows"]
    assert high["planted_kept"] == 0
    assert low["attention"] > 0.5 > 4 * random["attention"]


def test_low_norms_have_no_advantage_on_isotropic_keys(cells):
    low, random = cells[norms.ISOTROPIC, "knorm, keep low"], cells[norms.ISOTROPIC, "random"]
    assert low["attention"] <= random["attention"] + random["attention_margin"]
    assert abs(low["recall"]["value"] - random["recall"]["value"]) < 0.15


def test_rates_lie_in_their_intervals(cells):
    assert len(cells) == 10
    for cell in cells.values():
        assert cell["recall"]["low"] <= cell["recall"]["value"] <= cell["recall"]["high"]
        assert 0 < cell["attention"] < 1


def test_the_figure_is_drawn(cells, tmp_path):
    pytest.importorskip("matplotlib")
    shown = [norms.Cell(*(cell[name] for name in norms.Cell._fields)) for cell in cells.values()]
    norms.plot(shown, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
