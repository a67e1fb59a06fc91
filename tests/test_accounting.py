"""Accounting: what the numbers are, to the byte."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import streaming_llm


@pytest.mark.parametrize(("dtype", "size"), [(mx.float32, 4), (mx.float16, 2), (mx.bfloat16, 2)])
def test_lesson_35_bytes_follow_the_dtype_and_both_dimensions(dtype, size):
    config = streaming_llm.Config(budget=8, sink=1)
    state = streaming_llm.init_state(config, 3, 4, 6, dtype=dtype)
    assert int(veloxfn.kept_bytes(state)) == int(veloxfn.full_bytes(state)) == 0
    assert float(veloxfn.compression_ratio(state)) == 1.0
    for count, kept in ((5, 5), (15, 8)):
        state = streaming_llm.update_batched(
            config, state, mx.zeros((3, count, 4), dtype), mx.zeros((3, count, 6), dtype)
        )
        seen = 5 if count == 5 else 20
        assert veloxfn.tokens_seen(state).tolist() == [seen] * 3
        assert veloxfn.tokens_kept(state).tolist() == [kept] * 3
        assert veloxfn.tokens_kept(state).dtype == veloxfn.tokens_seen(state).dtype == mx.int32
        assert int(veloxfn.kept_bytes(state)) == 3 * kept * 10 * size
        assert int(veloxfn.full_bytes(state)) == 3 * seen * 10 * size
        assert float(veloxfn.compression_ratio(state)) == seen / kept
        assert (
            veloxfn.allocated_bytes(state) == state.slots.keys.nbytes + state.slots.values.nbytes == 3 * 9 * 10 * size
        )


def test_bytes_do_not_overflow_32_bits():
    config = streaming_llm.Config(budget=8, sink=1)
    state = streaming_llm.init_state(config, 2, 128, dtype=mx.float32)
    state = state._replace(slots=state.slots._replace(seen=mx.full((2,), 2**28, mx.int32)))
    assert int(veloxfn.full_bytes(state)) == 2 * 2**28 * 256 * 4
    many = streaming_llm.init_state(config, 64, 1, dtype=mx.float32)
    x = mx.zeros((64, 8, 1))
    many = streaming_llm.update_batched(config, many, x, x)
    many = many._replace(slots=many.slots._replace(seen=mx.full((64,), 2**28, mx.int32)))
    assert float(veloxfn.compression_ratio(many)) == 2**25
