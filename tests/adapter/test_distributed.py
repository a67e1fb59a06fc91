"""A model spread over two processes by heads: each evicts its own rows, and nothing but the place of the work changes.

Run as a script, this file is one of the processes: it prints what it generated and kept as JSON.
"""

import json
import os
import socket
import subprocess
import sys
from itertools import chain

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

import veloxfn
from veloxfn_mlx_adapter import make_prompt_cache

HEADS, KV_HEADS, LAYERS, PROMPT, COUNT = 8, 4, 2, 40, 24

SETTINGS = {
    "h2o": {"age_normalised": True},
    "tova": {},
    "knorm": {},
    "cam": {},
}
NOISY = {"keyformer": {}, "keyformer-additive": {"noise": "additive"}}


def tiny_llama():
    """A random model."""
    model = llama.Model(
        llama.ModelArgs("llama", 64, LAYERS, 48, HEADS, 1e-5, 61, num_key_value_heads=KV_HEADS, rope_theta=10000.0)
    )
    draws = iter(mx.random.split(mx.random.key(3), 100))
    model.update(tree_map(lambda leaf: 0.3 * mx.random.normal(leaf.shape, key=next(draws)), model.parameters()))
    mx.eval(model.parameters())
    return model


def run(name, group=None):
    """What a policy writes, and keeps in each layer: [{tokens, kept: [layer][head][position]}]."""
    model = tiny_llama()
    if group is not None:
        model.shard(group)
    settings = {**SETTINGS, **NOISY}[name]
    policy = veloxfn.policy(veloxfn.METHODS[name.partition("-")[0]].Config(budget=16, sink=2, **settings))
    caches = make_prompt_cache(model, policy)
    prompt = mx.random.randint(0, 61, (PROMPT,), key=mx.random.key(5))
    draws = iter(mx.random.split(mx.random.key(9), COUNT + 1))  # one step is made ahead
    steps = generate_step(
        prompt,
        model,
        max_tokens=COUNT,
        sampler=lambda logits: mx.random.categorical(logits, key=next(draws)),
        prompt_cache=caches,
        prefill_step_size=16,
    )
    tokens = [int(token) for token, _ in steps]
    for cache in caches:
        cache.settle()
    return {"tokens": tokens, "kept": [veloxfn.kept_positions(cache.method_state).tolist() for cache in caches]}


def ports(count):
    """Ports of the loopback that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """What each of two processes printed, in the order of their ranks."""
    hosts = tmp_path_factory.mktemp("ring") / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports(2)]))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.skip("two processes on 127.0.0.1 did not find each other over MLX's ring back end within 240 s")
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        if process.returncode == 3:
            pytest.skip(f"MLX's ring back end does not start here: {errors.strip().splitlines()[-1]}")
        assert process.returncode == 0, errors
    return [json.loads(text) for text, _ in printed]


@pytest.mark.parametrize("name", [*SETTINGS, *NOISY])
def test_shards_write_and_keep_what_one_process_does(shards, name):
    alone = run(name)
    assert len(set(alone["tokens"])) > 10
    assert [shard[name]["tokens"] for shard in shards] == [alone["tokens"]] * 2
    for layer in range(LAYERS):
        heads = [list(shard[name]["kept"][layer]) for shard in shards]
        assert [len(part) for part in heads] == [KV_HEADS // 2] * 2
        assert list(chain(*heads)) == alone["kept"][layer]


@pytest.mark.parametrize("name", ["h2o", "knorm", *NOISY])
def test_the_comparison_can_fail(name):
    """The halves keep different rows, so that shards in another order would show."""
    for heads in run(name)["kept"]:
        assert heads[: KV_HEADS // 2] != heads[KV_HEADS // 2 :]


def main():
    """One process of the group."""
    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    print(json.dumps({name: run(name, group) for name in [*SETTINGS, *NOISY]}))


if __name__ == "__main__":
    main()
