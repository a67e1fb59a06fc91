"""kernels.py, attend.py and their tables: every side evicts, the figures are put together rightly."""

import json

import attend
import launch_trace
import layers
import mlx.core as mx
import pytest
import sides
import steps
import tables
import timing
from sides import Shape

import kernels
from kernels import Case, config_of
from veloxfn.ops import launch

TINY = Shape(rows=2, dim=16, heads=2, budget=24)
BANDWIDTH = layers.Bandwidth(1e12, 1e12)
EVERY = (*kernels.METHODS, *kernels.MORE_METHODS)
needs_peer = pytest.mark.skipif(not sides.HAS_PEER, reason="the peer veloxquant-mlx is not installed")


def settings():
    return {"sink": 4, "recent": 6, "decay": 0.98}


@pytest.mark.parametrize("make", [layers.decoding, layers.updating])
@pytest.mark.parametrize("method", EVERY)
def test_all_layers_of_a_step_evict(method, make):
    made = layers.own(make, config_of(method, TINY.budget), TINY, mx.float16, 3)
    before = [layers.our_counts(state)[1] for state in made.states]
    for _ in range(3):
        made()
    made.check(TINY.budget)
    assert [layers.our_counts(state)[1] for state in made.states] == [seen + 3 for seen in before]
    assert all(state.slots.keys.dtype == mx.float16 for state in made.states)


@pytest.mark.parametrize("method", EVERY)
def test_a_step_reads_what_plain_attention_reads(method):
    config = config_of(method, TINY.budget)
    state = layers.full_state(config, TINY, mx.float32)
    block = sides.blocks(TINY, 1, mx.float32, seed=5)[0]
    output, after = layers.decoding(config)(state, *block)
    keys, values = kernels.veloxfn.candidates(config, kernels.veloxfn.policy(config).absorb(state, *block[:2]))
    want = mx.fast.scaled_dot_product_attention(block.queries, keys[:, None], values[:, None], scale=TINY.dim**-0.5)
    assert mx.allclose(output, want, rtol=1e-4, atol=1e-5).item()
    assert layers.our_counts(after)[0] == TINY.budget


def test_a_step_by_the_attention_of_the_output_keeps_what_one_by_queries_keeps():
    for method in EVERY:
        config = config_of(method, TINY.budget)
        whole = plain = layers.full_state(config, TINY, mx.float32)
        for block in sides.blocks(TINY, 1, mx.float32, count=12, seed=5):
            _, whole = layers.decoding(config)(whole, *block)
            _, plain = layers.updating(config)(plain, *block)
        assert mx.array_equal(whole.slots.positions, plain.slots.positions).item()


def test_attending_only_leaves_the_state_alone():
    made = layers.own(layers.attending_only, config_of("h2o", TINY.budget), TINY, mx.float32, 2)
    before = [state.slots.positions.tolist() for state in made.states]
    made()
    assert [state.slots.positions.tolist() for state in made.states] == before


@pytest.mark.parametrize("method", ["h2o", "keyformer additive", "cam", "cam nearest"])
def test_attending_and_evicting_apart_comes_to_the_same(method):
    config = config_of(method, TINY.budget)
    assert layers.ranks_by_output(config)
    block, other = sides.blocks(TINY, 1, mx.float32, count=2, seed=5)
    state = layers.full_state(config, TINY, mx.float32)
    state = kernels.veloxfn.policy(config).absorb(state, block.keys, block.values)
    output, positions, columns = layers.attending_only(config)(state, *other)
    apart, apart_positions, apart_columns = layers.attending_apart(config)(state, *other)
    assert mx.array_equal(positions, apart_positions).item()
    assert mx.allclose(output, apart, rtol=1e-4, atol=1e-6).item()
    assert all(mx.allclose(*pair, rtol=1e-5).item() for pair in zip(columns, apart_columns, strict=True))


def test_layers_have_buffers_of_their_own():
    made = layers.own(layers.updating, config_of("streaming_llm", TINY.budget), TINY, mx.float32, 2)
    first, second = made.states
    assert not mx.array_equal(first.slots.keys, second.slots.keys).item(), "each got another block"


@needs_peer
@pytest.mark.parametrize(("method", "compiled"), [("h2o", True), ("h2o", False), ("keyformer", False), ("knorm", True)])
def test_the_peers_layers_evict(method, compiled):
    made = layers.peer(method, TINY, mx.float16, 2, compiled=compiled, **settings())
    for _ in range(3):
        made()
    made.check(TINY.budget)


@needs_peer
def test_the_peers_state_is_that_of_its_own_prompt():
    for method, make in (
        ("h2o", lambda: sides.peer_h2o(TINY, mx.float16, sink=4, recent=6, decay=0.98)),
        ("knorm", lambda: sides.peer_knorm(TINY, mx.float16, sink=4)),
    ):
        own, theirs = layers.peer_state(method, TINY, mx.float16), make().state
        assert [(leaf.shape, leaf.dtype) for leaf in own] == [(leaf.shape, leaf.dtype) for leaf in theirs]


def test_a_side_that_evicts_nothing_is_refused():
    made = layers.Layers(lambda state, *_: ((), state), mx.zeros(3), 1, [()], lambda _: (3, 3))
    with pytest.raises(RuntimeError, match="no eviction took place: kept 3, seen 3, budget 24"):
        made.check(24)


def test_pure_mlx_inside_and_the_own_back_end_behind():
    before = launch.backend_for
    with kernels._pure():
        assert launch.backend_for(None) == "reference"
    assert launch.backend_for is before


@pytest.mark.parametrize("group", ["step", "chain", "token", "mass", "prompt"])
def test_a_group_from_case_to_table(group, tmp_path, capsys):
    file, page, results = (tmp_path / name for name in ("kernels.json", "kernels.md", "RESULTS.md"))
    results.write_text(tables.RESULTS.read_text())
    monkey = pytest.MonkeyPatch()
    cases, runner = kernels.GROUPS[group]
    monkey.setitem(kernels.GROUPS, group, (lambda *, quick: cases(quick=quick)[:1], runner))
    with monkey.context():
        assert kernels.main(["--quick", "--only", group, "--json", str(file), "--markdown", str(page)]) == 0
    monkey.undo()
    told = json.loads(file.read_text())
    assert (told["errors"], told["left_out"], told["quick"]) == ({}, [], True)
    assert {row["group"] for row in told["rows"]} == {group}
    assert {"gpu", "versions", "device"} <= set(told["machine"])
    assert {name.split(", ")[0] for name in told["launches"]} == {*EVERY}
    tables.main([str(file), "--into", str(results)])
    method = told["rows"][0]["method"]
    assert f"| {method} | 2 |" in results.read_text()
    assert "not to quote" in results.read_text()
    assert f"| {method} | 2 |" in page.read_text()
    assert told["rows"][0]["case"] in capsys.readouterr().out


def test_chained_layers_take_the_output_of_the_one_before():
    taken = []

    def noting(state, keys, values, queries):
        taken.append(queries)
        return queries + 1, state

    for chained in (False, True):
        taken.clear()
        block = mx.zeros((2, 1, 16)), mx.zeros((2, 1, 16)), mx.zeros((2, 1, 1, 16))
        layers.Layers(noting, (mx.zeros(1),), 3, [block], chained=chained)
        assert [float(queries.max()) for queries in taken] == ([0, 1, 2] if chained else [0, 0, 0])


def test_no_case_is_begun_when_the_minutes_are_over(tmp_path):
    file = tmp_path / "kernels.json"
    kernels.main(["--quick", "--only", "prompt", "--minutes", "0", "--json", str(file)])
    told = json.loads(file.read_text())
    assert told["rows"] == []
    assert len(told["left_out"]) == len(kernels.prompt_cases(quick=True))


def test_an_error_in_one_case_does_not_stop_the_next(monkeypatch, tmp_path, capsys):
    def runner(case, *_, **__):
        if case.method == "bad":
            raise RuntimeError("boom")
        yield steps.Row("figure", {**case.sizes, "tokens": 1, "mode": "m"}, 1.0, "ms")

    cases = [Case("bad", TINY, "float32"), Case("good", TINY, "float32")]
    monkeypatch.setitem(kernels.GROUPS, "prompt", (lambda *, quick: cases, runner))
    file = tmp_path / "kernels.json"
    assert kernels.main(["--quick", "--only", "prompt", "--json", str(file)]) == 1
    told = json.loads(file.read_text())
    assert [row["method"] for row in told["rows"]] == ["good"]
    assert list(told["errors"].values()) == ["RuntimeError: boom"]
    assert "ERROR in prompt: bad" in capsys.readouterr().out


def test_full_sizes_need_a_gpu_and_groups_a_name(capsys):
    if not kernels.on_gpu():
        with pytest.raises(SystemExit):
            kernels.main([])
        assert "--quick runs anywhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        kernels.main(["--quick", "--only", "step,nothing"])
    assert "--only nothing names none of" in capsys.readouterr().err


def test_cases_cover_what_has_a_target_and_no_case_comes_twice():
    first, others = kernels.step_cases(quick=False), kernels.other_step_cases(quick=False)
    assert len({*first, *others}) == len(first) + len(others)
    sizes = {(case.method, *case.shape, case.dtype) for case in [*first, *others]}
    for method in kernels.METHODS:
        for rows in (8, 32, 256):
            for budget in (512, 2048, 8192):
                for dim in (64, 128):
                    for dtype in ("float16", "bfloat16"):
                        assert (method, rows, dim, 1, budget, dtype) in sizes


def test_layers_fit_into_memory():
    large = Case("h2o", Shape(256, 128, 1, 8192), "float16")
    assert kernels.layer_count(large, kernels.FULL) == 4
    assert kernels.layer_count(Case("h2o", Shape(8, 64, 1, 512), "float16"), kernels.FULL) == 16


def test_seconds_are_given_per_layer_and_the_faster_peer_counts():
    names = ("step", "attend + evict", "update", "attention", "attention, budget rows", "step, pure MLX")
    seconds = {name: [4.0, 4.0] for name in (*names, "update, pure MLX")}
    seconds |= {"attention": [2.0, 2.0], "peer": [80.0, 20.0], "peer, not compiled": [40.0, 60.0]}
    seconds["update, not compiled"] = [10.0, 5.0]
    case = Case("h2o", Shape(32, 128, 1, 2048), "float16")
    rows = {
        row.case: row
        for row in kernels._step_rows(case, "m", 2, seconds, dict.fromkeys(seconds, 1.0), 0.5, bounds=True)
    }
    told = tables.record(rows["(attend + evict) / attention"])
    assert (told["value"]["median"], told["target"], told["met"], told["failed"]) == (2.0, "<= 1.3", False, False)
    assert told["seconds"]["attention"]["median"] == 1.0
    assert rows["peer / update"].value == (7.5, 6.25, 8.75, 5.0)
    assert rows["peer / update, as both ship"].value.median == 8.0
    assert rows["step / bytes of K and V"].value.median == 4.0


@pytest.mark.parametrize(("figure", "met", "failed"), [(1.2, True, False), (1.9, False, False), (2.1, False, True)])
def test_above_twice_the_attention_a_step_fails(figure, met, failed):
    row = steps.Row("c", {}, timing.Ratio(figure, figure, figure, figure), "x", tables.STEP_TARGET)
    told = tables.record(row)
    assert (told["met"], told["failed"]) == (met, failed)
    assert tables.figure(told).endswith("met" if met else "**fails**" if failed else "**missed**")


def test_targets_are_counted_with_the_worst():
    def row(value, target, met):
        return {"case": "c", "value": {"median": value}, "target": target, "met": met, "failed": False}

    text = tables.targets([row(9.0, ">= 8", True), row(7.0, ">= 8", False), row(20.0, ">= 8", True)])
    assert "| c | >= 8 | 3 | 2 | 0 | 7.00 | 9.00 |" in text


def test_what_the_gpu_ran_is_read_and_told():
    names = ("_ZN3mlx4core2cu11copy_kernelIfEEvT_", "_Z5plainPfm", "custom_kernel_veloxfn_attend_float16")
    ran = launch_trace.read("".join(f"K 0.0000{i}5000 {name}\n" for i, name in enumerate(names)) + "C 16\nF 4\nC 8\n")
    assert ran.kernels == ("copy_kernel", "plain", "custom_kernel_veloxfn_attend_float16")
    assert (ran.copies, ran.fills) == (2, 1)
    assert ran.seconds == pytest.approx(45e-6)
    assert ran.each == pytest.approx((5e-6, 15e-6, 25e-6))
    told = launch_trace._told("h2o", "attend, evict", TINY, ran)
    table = tables.tables_of({"script": "launch_trace", "rows": [told]})["launch trace"]
    assert "| h2o | attend, evict | 3 | 2 | 1 | 45.0 us | copy_kernel, plain," in table


def test_the_share_of_one_layer_of_several():
    text = "".join(
        f"K 0.00000{taken} {name}\n" for name, taken in [("a", 1), ("b", 2), ("b", 4), ("a", 3), ("b", 2), ("b", 8)]
    )
    ran = launch_trace.per_layer(launch_trace.read(text), 2)
    assert ran.kernels == ("a", "b", "b")
    assert ran.each == pytest.approx((2e-6, 4e-6, 4e-6))
    assert ran.seconds == pytest.approx(10e-6)
    assert launch_trace.per_layer(launch_trace.read(text), 1).kernels == ("a", "b", "b", "a", "b", "b")
    with pytest.raises(ValueError, match="of one layer, got a run of 2"):
        tables.tables_of({"script": "launch_trace", "layers": 2, "rows": []})


def test_a_later_run_replaces_figures_of_an_earlier_one():
    def run(**values):
        return {"rows": [{**TINY._asdict(), "dtype": "f", "case": case, "value": v} for case, v in values.items()]}

    both = tables.merged(run(a=1.0, b=2.0), run(a=3.0))
    assert [(row["case"], row["value"]) for row in both["rows"]] == [("a", 3.0), ("b", 2.0)]


def test_a_table_without_a_place_and_a_foreign_file_are_refused():
    text = "<!-- table: one -->\nold\n<!-- end -->\n"
    assert tables.fill(text, {"one": "new"}) == "<!-- table: one -->\nnew\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places for the table 'two'"):
        tables.fill(text, {"two": "new"})
    with pytest.raises(ValueError, match="script = None"):
        tables.tables_of({})


def test_attention_against_attend_and_evict(tmp_path, capsys):
    file, results = tmp_path / "attend.json", tmp_path / "RESULTS.md"
    attend.main(["--quick", "--dtypes", "float32", "--json", str(file)])
    results.write_text(tables.RESULTS.read_text())
    tables.main([str(file), "--into", str(results)])
    assert "| 2 | 4 | 16 | 64 | float32 | (attend + evict) / attention |" in results.read_text()
    assert "attend + evict" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        attend.main(["--dtypes", "int8"])


def test_attend_and_evict_have_a_target_in_single_precision():
    for dtype, target in (("float32", "<= 1.25"), ("float16", None)):
        (row,) = attend.compare(TINY, dtype, rounds=1, most_calls=1, bound=True)
        assert tables.record(row)["target"] == target
