"""Caches outside mlx_lm: in a model of one's own without mlx_lm, and in those of mlx_vlm where it is installed."""

import importlib.util
import pathlib
import subprocess
import sys

import mlx.core as mx
import pytest

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, attention, hook_installed

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples" / "second_host.py"


@pytest.fixture(scope="module")
def example():
    if not EXAMPLE.exists():
        pytest.skip("examples/ is not here (installed wheel)")
    spec = importlib.util.spec_from_file_location("second_host", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx_lm", "mlx_vlm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without_mlx_lm(code):
    """Run code in a process where neither mlx_lm nor mlx_vlm is installed."""
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=240)


def test_the_example_runs_where_mlx_lm_cannot_be_imported():
    if not EXAMPLE.exists():
        pytest.skip("examples/ is not here (installed wheel)")
    done = without_mlx_lm(f"import runpy\nrunpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert "h2o" in done.stdout


def test_the_example_imports_no_mlx_lm_where_it_can():
    if not EXAMPLE.exists():
        pytest.skip("examples/ is not here (installed wheel)")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("mlx_lm is not loaded\n")


def test_what_needs_mlx_lm_says_so():
    done = without_mlx_lm("import veloxfn_mlx_adapter\nveloxfn_mlx_adapter.make_prompt_cache")
    assert "ModuleNotFoundError: make_prompt_cache needs mlx-lm, which is not installed; run: pip" in done.stderr
    done = without_mlx_lm("import veloxfn_mlx_adapter\nprint(dir(veloxfn_mlx_adapter))\nveloxfn_mlx_adapter.nothing")
    assert "'make_prompt_cache'" in done.stdout
    assert "has no attribute 'nothing'" in done.stderr


def by_hand(example, model, policy, states, tokens, start):
    """The example's forward pass with states in place of caches: logits and the states after it."""
    x, after = model.embedding(tokens), []
    batch, count = tokens.shape
    for layer, state in zip(model.layers, states, strict=True):
        queries, keys, values = layer.heads(x, start)
        state = policy.absorb(state, keys.flatten(0, 1), values.flatten(0, 1))
        grouped = queries.reshape(batch * example.KV_HEADS, -1, count, example.HEAD_DIM)
        y, state = veloxfn.attend(policy, state, grouped)
        x = layer.after(x, y.reshape(queries.shape))
        after.append(state)
    return model.embedding.as_linear(model.norm(x)), after


@pytest.mark.parametrize("name", ["h2o", "keyformer", "tova", "knorm"])
@pytest.mark.parametrize("batch", [1, 3])
def test_caches_do_what_the_pure_functions_do(example, name, batch):
    settings = {"age_normalised": True} if name == "h2o" else {}
    policy = veloxfn.policy(veloxfn.METHODS[name].Config(budget=16, sink=2, **settings))
    mx.random.seed(1)
    model = example.Decoder()
    tokens = mx.random.randint(0, example.TOKENS, (batch, 60))
    caches = example.make_caches(policy)
    states = [
        policy.init_state(
            batch * example.KV_HEADS,
            example.HEAD_DIM,
            dtype=mx.float32,
            streams=veloxfn.streams(batch, example.KV_HEADS, layer),
        )
        for layer in range(example.LAYERS)
    ]
    start = 0
    for count in (20, 7, *(1,) * 30, 3):
        block = tokens[:, start : start + count]
        logits = model(block, caches)
        expected, states = by_hand(example, model, policy, states, block, start)
        assert mx.allclose(logits, expected, atol=1e-4, rtol=1e-4)
        start += count
        assert [cache.offset for cache in caches] == [start] * example.LAYERS
    for cache, state in zip(caches, states, strict=True):
        cache.settle()
        kept = veloxfn.kept_positions(cache.method_state)
        assert kept.shape == (batch * example.KV_HEADS, 16)
        assert mx.array_equal(kept, veloxfn.kept_positions(state))
        for ours, theirs in zip(policy.get_kv(cache.method_state), policy.get_kv(state), strict=True):
            assert mx.allclose(ours, theirs, atol=1e-4)


def test_attention_with_other_caches_is_mlxs_own():
    queries, keys = mx.random.normal((1, 4, 5, 8)), mx.random.normal((1, 2, 5, 8))
    expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask="causal")
    for cache in (None, object()):
        assert mx.array_equal(attention(queries, keys, keys, cache=cache, scale=0.3, mask="causal"), expected)
    cache = EvictingCache(veloxfn.policy(veloxfn.h2o.Config(budget=16)))
    fetched = cache.update_and_fetch(keys, keys)
    assert mx.array_equal(attention(queries, *fetched, cache=cache, scale=0.3, mask="causal"), expected)
    with pytest.raises(TypeError, match="nothing_of_mlxs"):
        attention(queries, keys, keys, cache=None, scale=0.3, nothing_of_mlxs=1)


@pytest.fixture(scope="module")
def twins():
    """A llama of mlx_vlm and one of mlx_lm, with the same weights."""
    try:
        module = importlib.import_module("mlx_vlm.models.llama")
    except ImportError as error:
        pytest.skip(f"mlx-vlm cannot be imported here: {error}")
    from mlx_lm.models import llama

    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 61,
    }
    mx.random.seed(7)
    ours = llama.Model(llama.ModelArgs.from_dict(sizes))
    model = module.Model(module.ModelConfig.from_dict(sizes)).language_model
    model.update(ours.parameters())
    mx.eval(model.parameters(), ours.parameters())
    return model, ours


class TestVision:
    """mlx_vlm's language models, which call the attention of mlx_vlm.models.base."""

    def caches(self, name="h2o", **settings):
        if name == "h2o":
            settings = {"age_normalised": True, **settings}
        policy = veloxfn.policy(veloxfn.METHODS[name].Config(**settings))
        return [EvictingCache(policy, layer=layer) for layer in range(2)]

    def run(self, model, caches, tokens):
        logits, start = [], 0
        for count in (20, 6, *(1,) * 20):
            made = model(tokens[:, start : start + count], cache=caches)
            logits.append(getattr(made, "logits", made))
            start += count
        return mx.concatenate(logits, axis=1)

    def test_below_the_budget_it_is_the_models_own_cache(self, twins, tokens):
        from mlx_vlm.models.cache import make_prompt_cache

        model, _ = twins
        expected = self.run(model, make_prompt_cache(model), tokens(46))
        assert mx.array_equal(self.run(model, self.caches(budget=64), tokens(46)), expected)

    @pytest.mark.parametrize("name", ["h2o", "tova", "knorm"])
    def test_under_eviction_it_is_the_same_model_in_mlx_lm(self, twins, tokens, name):
        kept, logits = [], []
        for model in twins:
            caches = self.caches(name, budget=16)
            logits.append(self.run(model, caches, tokens(46)))
            for cache in caches:
                cache.settle()
            kept.append([veloxfn.kept_positions(cache.method_state).tolist() for cache in caches])
        assert mx.allclose(*logits, atol=1e-5)
        assert kept[0] == kept[1]
        assert len(kept[0][0][0]) == 16

    def test_the_hook_goes_with_the_caches(self, twins):
        from mlx_vlm.models import base

        module = importlib.import_module(type(twins[0]).__module__)
        original = base.scaled_dot_product_attention
        caches = self.caches(budget=16)
        assert hook_installed()
        assert module.scaled_dot_product_attention is base.scaled_dot_product_attention is not original
        del caches
        assert module.scaled_dot_product_attention is base.scaled_dot_product_attention is original
