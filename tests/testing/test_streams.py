"""Streams, strategies and states as the laws read them."""

import subprocess
import sys
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from veloxfn import knorm
from veloxfn.testing import Stream, fingerprint, normal_stream, uniform_stream
from veloxfn.testing.checking import sample_streams
from veloxfn.testing.drive import bits, differences, kept, leaves, run, snapshot
from veloxfn.testing.laws.graph import primitives
from veloxfn.testing.strategies import GRID, budgets, dtypes, groupings, streams, valid_masks
from veloxfn.testing.streams import split
from veloxfn.testing.subjects import Subject, registry


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_grid_streams_are_exact(data: st.DataObject) -> None:
    """Keys, queries and values survive every dtype, and dot products are the same in any order."""
    stream = data.draw(streams(budget=data.draw(budgets()), padded=data.draw(st.booleans())))
    for numbers in (stream.keys, stream.values, stream.queries):
        back = np.array(stream.array(numbers).astype(mx.float32))
        assert np.array_equal(back, numbers)
    assert np.array_equal(stream.keys / GRID, np.round(stream.keys / GRID))
    exact = np.einsum("ntd,ngsd->ngts", stream.keys.astype(float), stream.queries.astype(float))
    assert np.array_equal(exact.astype(np.float32), exact)
    assert sum(stream.blocks) == stream.tokens


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_groupings_sum_to_the_tokens(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 30))
    blocks = data.draw(groupings(tokens, budget=data.draw(budgets())))
    assert sum(blocks) == tokens
    assert min(blocks) >= 0


REACH = settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])


@pytest.mark.parametrize(
    "wanted",
    [
        lambda s: 0 in s.blocks and s.tokens > 3,
        lambda s: s.blocks[0] == 1 and len(s.blocks) == 2 and s.tokens > 5,
        lambda s: max(s.blocks) > 4,
        lambda s: s.uniform and s.tokens > 4,
        lambda s: s.padded and s.valid.any(),
        lambda s: s.key_dim != s.value_dim,
        lambda s: s.queries.shape[1] == 3,
        lambda s: s.dtype == mx.bfloat16,
        lambda s: len(np.unique(np.abs(s.keys[0, :, 0]))) > 2,
    ],
    ids=["empty block", "one first", "larger than the budget", "uniform", "padded", "Dv", "G", "bf16", "varied"],
)
def test_strategies_reach(wanted) -> None:
    find(streams(budget=4, padded=True), wanted, settings=REACH)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_masks_and_dtypes(data: st.DataObject) -> None:
    mask = data.draw(valid_masks(2, 5))
    assert mask.shape == (2, 5)
    assert data.draw(dtypes()) in (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_fingerprints_name_row_and_token_in_every_dtype(dtype: mx.Dtype) -> None:
    values = np.array(mx.array(fingerprint(5, 2000, 4)).astype(dtype).astype(mx.float32))
    names = {tuple(line) for row in values for line in row.tolist()}
    assert len(names) == 5 * 2000


def test_rows_keep_their_names() -> None:
    stream = normal_stream(rows=3, tokens=4).only([2, 0])
    assert np.array(stream.row_names()).tolist() == [2, 0]
    assert stream.head(2).tokens + stream.tail(2).tokens == 4


def test_blocks_must_sum_to_the_tokens() -> None:
    with pytest.raises(ValueError, match="sum to T = 4"):
        normal_stream(tokens=4, blocks=(1, 2))
    assert split(7, 3) == (3, 3, 1)


def test_bits_tell_nan_and_signed_zero() -> None:
    assert np.array_equal(bits(mx.array([float("nan")])), bits(mx.array([float("nan")])))
    assert not np.array_equal(bits(mx.array([0.0])), bits(mx.array([-0.0])))
    assert bits(mx.array([1.0], dtype=mx.bfloat16)).dtype == np.uint16


class Pair(NamedTuple):
    first: mx.array
    second: mx.array


def test_snapshots_cannot_be_reached_and_differences_are_named() -> None:
    pair = Pair(mx.zeros((2,)), mx.ones((2,)))
    before = snapshot(pair)
    pair.first[0] = 3.0
    assert differences(before, snapshot(pair)) == ["first: 1 numbers differ, the first at [0]"]
    told = differences(before, snapshot(Pair(mx.zeros((2,)), mx.ones((3,)))))
    assert len(told) == 1
    assert told[0].startswith("second: ")
    with pytest.raises(AssertionError, match="holds arrays only, found int 3 at second"):
        leaves((mx.zeros(1),) and Pair(mx.zeros(1), 3))


def test_kept_reads_slots_in_temporal_order() -> None:
    policy = knorm.policy(knorm.Config(budget=3, sink=0))
    stream = normal_stream(rows=1, tokens=9)
    (row,) = kept(run(policy, stream))
    assert row.positions.tolist() == sorted(row.positions.tolist())
    assert np.array_equal(row.keys, bits(stream.array(stream.keys))[0, row.positions])


def test_primitives_lists_a_graph() -> None:
    found = primitives(lambda a, b: (a @ b).sum(), mx.zeros((2, 3)), mx.zeros((3, 4)))
    assert [one.name for one in found][:2] == ["Matmul", "Reduce"]
    assert found[0].outputs[0][1] == (2, 4)
    with pytest.raises(AssertionError, match="cannot be exported"):
        primitives(lambda a: a if a.sum().item() > 0 else -a, mx.zeros((2,)))


def test_sample_streams_and_registry() -> None:
    samples = list(sample_streams(5))
    assert {stream.dtype for stream in samples} == {mx.float32, mx.float16, mx.bfloat16}
    assert any(stream.padded for stream in samples)
    assert isinstance(uniform_stream(), Stream)
    names = [repr(subject) for subject in registry()]
    assert len(set(names)) == len(names)
    picky = Subject("picky", lambda budget: knorm.policy(knorm.Config(budget=budget)))
    assert picky.budgets == (5, 7, 9)


def test_the_library_does_not_import_its_tests() -> None:
    """`import veloxfn` needs neither Hypothesis nor pytest, and the laws do without them as well."""
    code = "import sys, {}; print([m for m in ('hypothesis', 'pytest', 'veloxfn.testing') if m in sys.modules])"
    for module, expected in (("veloxfn", "[]"), ("veloxfn.testing", "['veloxfn.testing']")):
        done = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected, f"import {module} pulls in {done.stdout}"
