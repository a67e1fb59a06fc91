"""How much attention changes, measured from outside."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from veloxfn_mlx_adapter.cosines import layer_cosines

GPT2 = {"layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 1024}
NEOX = {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
}


def after_of(block, x):
    """The hidden state after attention and residual, as each family's block computes it."""
    family = type(block).__module__.rpartition(".")[2]
    mask = mx.tri(x.shape[1], dtype=mx.bool_)
    if family == "gpt2":
        return x + block.attn(block.ln_1(x), mask, None)
    if family == "gpt_neox":
        return x + block.attention(block.input_layernorm(x), mask, None)
    if family == "olmo2":
        return x + block.post_attention_layernorm(block.self_attn(x, mask, None))
    answer = block.self_attn(block.input_layernorm(x), mask, None)
    if family in ("gemma2", "gemma3_text"):
        answer = block.post_attention_layernorm(answer)
    return x + answer * getattr(block, "residual_multiplier", 1.0)


def by_hand(model, prompt, layers):
    inner = model.model if hasattr(model, "model") else model
    x = next(getattr(inner, name) for name in ("embed_tokens", "embed_in", "wte") if hasattr(inner, name))(prompt)
    if hasattr(inner, "wpe"):
        x = x + inner.wpe(mx.arange(prompt.shape[1]))
    if type(model).__module__.endswith("gemma2"):
        x = x * 32**0.5
    found = {}
    for i, block in enumerate(model.layers):
        y = after_of(block, x)
        cosines = (x * y).sum(-1) / mx.sqrt((x * x).sum(-1) * (y * y).sum(-1))
        found[i] = cosines.mean().item()
        x = block(x, mx.tri(x.shape[1], dtype=mx.bool_), None)
    return {i: found[i] for i in layers}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("phi3", {}),
        ("phi", {}),
        ("cohere", {}),
        ("starcoder2", {}),
        ("olmo2", {}),
        ("granite", GRANITE),
        ("gemma2", {"query_pre_attn_scalar": 8.0}),
        ("gpt2", GPT2),
        ("gpt_neox", {**NEOX, "use_parallel_residual": True}),
        ("gpt_neox", {**NEOX, "use_parallel_residual": False}),
    ],
)
def test_it_is_the_mean_over_tokens_of_the_cosine_around_attention(tiny, tokens, family, changes):
    model, prompt = tiny(family, **changes), tokens(40, batch=2)
    found, expected = layer_cosines(model, prompt), by_hand(model, prompt, (0, 1))
    assert list(found) == [0, 1]
    assert found == pytest.approx(expected, abs=1e-5)
    assert all(0.0 < cosine < 0.999 for cosine in found.values())


def test_chunks_and_shapes_do_not_matter(tiny, tokens, monkeypatch):
    model, prompt = tiny(), tokens(50)
    whole = layer_cosines(model, prompt)
    assert layer_cosines(model, prompt[0]) == layer_cosines(model, prompt[0].tolist()) == whole
    monkeypatch.setattr("veloxfn_mlx_adapter.cosines._CHUNK", 7)
    assert layer_cosines(model, prompt) == pytest.approx(whole, abs=1e-5)


def test_half_precision_is_summed_in_float32(tiny, tokens):
    prompt = tokens(2000)
    assert layer_cosines(tiny(dtype=mx.bfloat16), prompt) == pytest.approx(layer_cosines(tiny(), prompt), abs=0.01)


def test_only_layers_of_full_attention_unless_others_are_asked_for(tiny, tokens):
    model, prompt = tiny("gemma3_text"), tokens(30)
    assert list(layer_cosines(model, prompt)) == [1, 3]
    every = layer_cosines(model, prompt, layers=[3, 0, 1, 2])
    assert list(every) == [0, 1, 2, 3]
    assert {i: every[i] for i in (1, 3)} == layer_cosines(model, prompt)
    for layers in ([4], [-1]):
        with pytest.raises(ValueError, match=r"layers must be [<>]= [03], got"):
            layer_cosines(model, prompt, layers=layers)


def calls_of(model):
    return {type(module): type(module).__call__ for module in model.modules()}


def test_the_model_and_its_classes_are_left_as_they_were(tiny, tokens):
    model = tiny()
    before, logits = calls_of(model), model(tokens(20))
    layer_cosines(model, tokens(20))
    assert calls_of(model) == before
    assert mx.array_equal(model(tokens(20)), logits)
    assert "__call__" in vars(llama.TransformerBlock)


class InheritingNorm(nn.RMSNorm):
    """A norm without a call of its own."""


def test_a_class_that_inherits_its_call_inherits_it_again(tiny, tokens):
    model = llama.Model(tiny().args)
    model.update(tiny().parameters())
    for block in model.layers:
        block.post_attention_layernorm.__class__ = InheritingNorm
    assert layer_cosines(model, tokens(20)) == pytest.approx(layer_cosines(tiny(), tokens(20)), abs=1e-6)
    assert "__call__" not in vars(InheritingNorm)


def test_an_error_inside_the_model_leaves_nothing_behind(tiny, tokens, monkeypatch):
    model = tiny()
    before = calls_of(model)
    monkeypatch.setattr(llama.MLP, "__call__", lambda self, x: 1 / 0)
    broken = calls_of(model)
    with pytest.raises(ZeroDivisionError):
        layer_cosines(model, tokens(20))
    assert calls_of(model) == broken
    monkeypatch.undo()
    assert calls_of(model) == before


def test_threads_measure_one_after_another_and_others_go_on(tiny, tokens):
    """Each gets its own figures, other uses of the model meanwhile theirs, and the classes their calls."""
    model, prompts = tiny(), [tokens(64, seed=seed) for seed in range(4)]
    before = calls_of(model)
    expected = [layer_cosines(model, prompt) for prompt in prompts]
    logits = [model(prompt) for prompt in prompts]
    mx.eval(logits, model.parameters())
    found, others, errors = [None] * 4, [None] * 4, []
    start = threading.Barrier(8)

    def measure(i):
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                start.wait()
                for _ in range(5):
                    found[i] = layer_cosines(model, prompts[i])
        except Exception as error:
            errors.append(error)

    def use(i):
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                start.wait()
                for _ in range(5):
                    others[i] = mx.array_equal(model(prompts[i]), logits[i]).item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(i,)) for target in (measure, use) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == expected
    assert others == [True] * 4
    assert calls_of(model) == before


class Hidden(nn.Module):
    """A block whose attention has another name, or whose sum with the residual no norm sees."""

    def __init__(self, block, name):
        super().__init__()
        self.inner, self.use_sliding = block, False
        if name:
            self[name] = block.self_attn
        self.name = name

    def __call__(self, x, mask, cache):
        if not self.name:
            return self.inner(x, mask, cache)
        h = x + self[self.name](self.inner.input_layernorm(x), mask, cache)
        return h + self.inner.mlp(self.inner.post_attention_layernorm(h))


@pytest.mark.parametrize("name", ["", "self_attn"])
def test_layers_that_cannot_be_seen_are_named(tiny, tokens, name):
    model = llama.Model(tiny(num_hidden_layers=3).args)
    model.model.layers[1] = Hidden(model.layers[1], name)
    message = r"around the attention of layers \[1\] of mlx_lm.models.llama.Model cannot be seen.* self_attn, attn or"
    with pytest.raises(ValueError, match=message):
        layer_cosines(model, tokens(20))
    assert list(layer_cosines(model, tokens(20), layers=[0, 2])) == [0, 2]


def test_a_norm_without_weights_of_its_own_is_not_guessed(tiny, tokens, monkeypatch):
    """The feed-forward gets the normed state: not what is asked for."""

    def call(self, x, mask=None, cache=None):
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(mx.fast.rms_norm(h, None, 1e-5))

    monkeypatch.setattr(llama.TransformerBlock, "__call__", call)
    with pytest.raises(ValueError, match=r"layers \[0, 1\] .* cannot be seen"):
        layer_cosines(tiny(), tokens(20))


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], ValueError, r"tokens must be \[T\] or \[B, T\] and not empty, got \[1, 0\]"),
        (mx.zeros((1, 2, 3), mx.int32), ValueError, r"got \[1, 2, 3\]"),
        ([0.5, 1.0], TypeError, "tokens must be ints, got mlx.core.float32"),
    ],
)
def test_tokens_are_checked(tiny, tokens, error, message):
    with pytest.raises(error, match=message):
        layer_cosines(tiny(), tokens)


def test_states_that_are_not_finite_are_no_cosines(tiny, tokens):
    model = llama.Model(tiny().args)
    model.update(tiny().parameters())
    model.layers[1].self_attn.o_proj.weight = mx.full((32, 32), float("nan"))
    with pytest.raises(ValueError, match=r"the hidden states of layers \[1\] of .* are not finite"):
        layer_cosines(model, tokens(20))
