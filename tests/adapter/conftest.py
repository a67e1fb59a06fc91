"""Tiny random models of several families, and the trained demo model where its package is installed."""

import importlib
import json
import warnings
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import veloxfn

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx_lm
from mlx_lm.models import cache as mlx_lm_cache

from veloxfn_mlx_adapter import demo, make_prompt_cache
from veloxfn_mlx_adapter.measured import MeasuredWorse

_BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 61,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"head_dim": None},
    "phi": {"head_dim": None, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "gemma": {},
    "starcoder2": {"head_dim": None, "norm_epsilon": 1e-5},
    "cohere": {"layer_norm_eps": 1e-5, "layer_norm_bias": False, "logit_scale": 1.0},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "experts_per_token": 1,
        "sliding_window": 16,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_model(family="llama", dtype=mx.float32, **changes):
    """A random model of a few thousand parameters."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    arguments = {"model_type": family, **_BASE, **FAMILIES.get(family, {}), **changes}
    if arguments["head_dim"] is None:
        del arguments["head_dim"]
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(arguments))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def whatever_was_measured():
    """Methods are tried here in every way, those that are warned of (`test_measured.py`) too."""
    warnings.simplefilter("ignore", MeasuredWorse)


@pytest.fixture(scope="session")
def tiny():
    made = {}

    def build(family="llama", dtype=mx.float32, **changes):
        key = (family, str(dtype), repr(sorted(changes.items())))
        if key not in made:
            made[key] = tiny_model(family, dtype, **changes)
        return made[key]

    return build


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct: model and tokenizer."""
    try:
        demo.gguf_path()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    model, tokenizer = demo.load_demo()
    return SimpleNamespace(model=model, tokenizer=tokenizer)


LETTERS_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """A folder that mlx_lm loads, its model and tokenizer: tiny, writes ASCII characters at random, never ends."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("letters")
    known = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last two stand for a blank and a new line
    characters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(known)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    characters.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters, bos_token="<s>", eos_token="</s>", chat_template=LETTERS_TEMPLATE
    )
    fast.save_pretrained(folder)
    shape = {"model_type": "llama", **_BASE, "vocab_size": len(known) + 2}
    model = tiny_model(vocab_size=len(known) + 2)
    weights = {name: 4 * weight for name, weight in tree_flatten(model.parameters())}  # else it repeats one letter
    weights["model.embed_tokens.weight"][-2:] = 0  # never the likeliest
    (folder / "config.json").write_text(json.dumps(shape))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    model, tokenizer = mlx_lm.load(str(folder))
    return SimpleNamespace(folder=folder, model=model, tokenizer=tokenizer)


@pytest.fixture
def caches_of():
    """Eviction caches by method name and settings; h2o age-normalised by default, as on the command line."""

    def build(model, method="h2o", **settings):
        if method == "h2o":
            settings = {"age_normalised": True, **settings}
        if method == "pyramidkv":
            full = [type(cache) is mlx_lm_cache.KVCache for cache in mlx_lm_cache.make_prompt_cache(model)]
            settings = {"layers": sum(full), **settings}
        return make_prompt_cache(model, veloxfn.policy(veloxfn.METHODS[method].Config(**settings)))

    return build


@pytest.fixture
def stock():
    """The model's own caches."""
    return mlx_lm_cache.make_prompt_cache


@pytest.fixture
def tokens():
    """Random tokens [B, count] of the tiny vocabulary."""

    def draw(count, batch=1, seed=0):
        return mx.random.randint(0, 61, (batch, count), key=mx.random.key(seed))

    return draw


@pytest.fixture
def feed():
    """Run tokens [B, T] through a model in pieces of the given lengths (the rest one by one); logits [B, T, V]."""

    def run(model, caches, inputs, *lengths):
        outputs, start = [], 0
        for length in [*lengths, *(1,) * (inputs.shape[1] - sum(lengths))]:
            outputs.append(model(inputs[:, start : start + length], cache=caches))
            mx.eval(outputs[-1])
            start += length
        return mx.concatenate(outputs, axis=1)

    return run
