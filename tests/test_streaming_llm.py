"""StreamingLLM by examples."""

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import streaming_llm


@pytest.mark.parametrize("blocks", [[1] * 20, [20], [3, 17], [19, 1]])
@pytest.mark.parametrize("sink", [0, 2])
def test_sinks_and_the_most_recent(sink, blocks):
    config = streaming_llm.Config(budget=6, sink=sink)
    state = streaming_llm.init_state(config, 2, 1, dtype=mx.float32)
    for count in blocks:
        x = mx.random.normal((2, count, 1), key=mx.random.key(count))
        state = streaming_llm.update_batched(config, state, x, x)
    assert veloxfn.kept_positions(state).tolist() == 2 * [[*range(sink), *range(20 - 6 + sink, 20)]]
