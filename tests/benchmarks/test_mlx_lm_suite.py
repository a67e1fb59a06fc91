"""What a test of mlx_lm's says of eviction caches: a failure has a reason that was seen, or is a fault."""

import json

import mlx_lm_suite
import pytest
from mlx_lm_suite import Ended

STOCK = Ended("passed", stock=30)
NAME = "test_generate.TestGenerate.test_batch"


def failed(**seen):
    return Ended("failed", "AssertionError: 2 != 1", "self.assertEqual(a, b)", ours=30, **seen)


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ({"trim": 1}, "trim"),
        ({"quantised": 1, "trim": 1}, "kv_bits"),
        ({"evicted": 9, "window": 1}, "rows"),
        ({"evicted": 9}, "FAULT"),
        ({}, "FAULT"),
    ],
)
def test_a_failure_is_a_fault_unless_a_refusal_was_seen(seen, kind):
    assert mlx_lm_suite.verdict(NAME, STOCK, failed(**seen)).kind == kind


def test_what_is_expected_of_one_test_under_eviction_excuses_no_other_and_nothing_without_eviction():
    for name, kind in (("test_make_mask_with_cache", "rows"), ("test_stream_generate_speculative", "drafts")):
        full = next(full for full in (*mlx_lm_suite._COUNTED, *mlx_lm_suite._DRAFTED) if full.endswith(name))
        assert mlx_lm_suite.verdict(f"test_a.{full}", STOCK, failed(evicted=9)).kind == kind
        assert mlx_lm_suite.verdict(f"test_a.{full}", STOCK, failed()).kind == "FAULT"
        assert mlx_lm_suite.verdict(f"test_a.{full}_too", STOCK, failed(evicted=9)).kind == "FAULT"


def test_other_chunks_are_a_reason_only_if_the_same_chunks_pass_under_eviction():
    evicting, passed = failed(evicted=9), Ended("passed", ours=30, evicted=9)
    assert mlx_lm_suite.verdict(NAME, STOCK, evicting, passed).kind == "chunks"
    for again in (failed(evicted=9), passed._replace(evicted=0), None):
        assert mlx_lm_suite.verdict(NAME, STOCK, evicting, again).kind == "FAULT"
    assert mlx_lm_suite.verdict(NAME, STOCK, failed(), passed).kind == "FAULT"  # no eviction: chunks make no difference


def test_stock_classes_are_a_reason_where_they_are_named():
    for line, kind in (
        ("full = BatchKVCache.merge([a, b])", "stock classes"),
        ("full = KVCache.merge([a, b])", "FAULT"),
    ):
        assert mlx_lm_suite.verdict(NAME, STOCK, failed()._replace(line=line)).kind == kind
    named = failed()._replace(error="TypeError: got RotatingKVCache")
    assert mlx_lm_suite.verdict(NAME, STOCK, named).kind == "stock classes"


def test_what_passes_must_have_used_eviction_caches_and_got_its_tokens_back():
    passed = Ended("passed", ours=30)
    assert mlx_lm_suite.verdict(NAME, STOCK, passed).kind == "passed"
    assert mlx_lm_suite.verdict(NAME, STOCK, passed._replace(ours=0)).kind == "not used"
    assert mlx_lm_suite.verdict(NAME, STOCK, passed._replace(trim=1)).kind == "trim"


def test_what_stock_caches_fail_is_not_held_against_others():
    assert mlx_lm_suite.verdict(NAME, failed(), failed()).kind == mlx_lm_suite.BASELINE


@pytest.mark.parametrize("ours", [{}, {NAME: Ended("unfinished", ours=3, trim=1)}])
def test_a_test_that_never_ended_is_a_fault(ours):
    assert mlx_lm_suite.compare({NAME: STOCK}, ours)[NAME].kind == "FAULT"


def test_a_report_counts_every_test_and_names_faults(tmp_path):
    path = tmp_path / "ended.json"
    path.write_text(json.dumps({NAME: {"outcome": "failed", "error": "E: x", "ours": 3, "inside": ["cache.py:trim"]}}))
    found = mlx_lm_suite.compare(
        {NAME: STOCK, "other": STOCK}, {**mlx_lm_suite.read(path), "other": Ended("passed", ours=1)}
    )
    lines = list(mlx_lm_suite.report({"h2o 6": found}))
    assert lines[1].startswith("| h2o 6 | 1 | 0 |")
    assert lines[-1] == f"- fault in {NAME}, h2o 6: E: x"
    assert not any(line.startswith("| other") for line in lines)
    assert mlx_lm_suite.read(tmp_path / "none.json") == {}


def test_the_stand_in_makes_eviction_caches_that_know_their_kind():
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx_lm_column

    from veloxfn_mlx_adapter import EvictingCache

    kind = mlx_lm_column.stand_in(mlx_lm_column.policy_of("h2o 6"))
    made = kind()
    assert type(made) is EvictingCache
    assert made.layer_budget == 6
    assert isinstance(made, kind)
    assert not isinstance(object(), kind)
    assert type(kind.merge([made, kind()])) is EvictingCache
    assert mlx_lm_column.policy_of("stock") is None
