"""A decoder in plain MLX whose KV cache stays at a fixed budget: no mlx_lm, no cache object.

    python examples/custom_decoder.py --method h2o --budget 64
    LD_PRELOAD=libopenblas.so.0 python examples/custom_decoder.py     # Linux, where OpenBLAS is installed

Trains a small byte-level transformer on six short texts, then reads held-out passages in blocks of 32 bytes and goes on
byte by byte: about a minute on two CPU cores with OpenBLAS, several without it. Every layer writes the block's keys and
values, attends to everything kept and the block, and lets go of the weakest:

    y, state = veloxfn.step(policy, state, keys, values, queries)

It prints the bits per byte of held-out passages with the full cache, under the budget and under a sliding window of the
same budget, then the bytes that the model writes. After so little training the text is babble, and the model makes no
use of bytes older than the default budget: the three numbers lie within 0.01 of each other. The example shows how the
parts fit together; what the methods keep of a real model's quality is for the benchmarks to say.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

import veloxfn

TEXTS = Path(__file__).resolve().parent.parent / "benchmarks" / "texts"
DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
LENGTH, BLOCK = 256, 32  # bytes of a training row and of a held-out passage; bytes read at once under a budget
TEMPERATURE = 0.5


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values pass through a veloxfn state."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.rope = nn.RoPE(HEAD_DIM)

    def heads(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries [B, Hq, S, D] and keys [B, Hkv, S, D], and values [B, Hkv, S, D]."""
        batch, count, _ = x.shape
        split = self.qkv(x).reshape(batch, count, -1, HEAD_DIM).swapaxes(1, 2)
        queries, keys, values = mx.split(split, [HEADS, HEADS + KV_HEADS], axis=1)
        return self.rope(queries, offset=offset), self.rope(keys, offset=offset), values

    def merge(self, x: mx.array) -> mx.array:
        """[B, Hq, S, D] -> [B, S, DIM]."""
        return self.out(x.swapaxes(1, 2).flatten(2))

    def __call__(self, x: mx.array) -> mx.array:
        """The whole text at once, for training."""
        queries, keys, values = self.heads(x, 0)
        return self.merge(
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=HEAD_DIM**-0.5, mask="causal")
        )

    def step(self, x: mx.array, policy: veloxfn.Policy[Any], state: Any, offset: int) -> tuple[mx.array, Any]:
        """A block of S tokens [B, S, DIM] under a budget: rows are batch x kv heads, with their query heads."""
        batch, count, _ = x.shape
        queries, keys, values = self.heads(x, offset)
        grouped = queries.reshape(batch * KV_HEADS, HEADS // KV_HEADS, count, HEAD_DIM)
        y, state = veloxfn.step(policy, state, keys.flatten(0, 1), values.flatten(0, 1), grouped)
        return self.merge(y.reshape(batch, HEADS, count, HEAD_DIM)), state


class Block(nn.Module):
    """Attention and a gated MLP, each on a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = [nn.RMSNorm(DIM), nn.RMSNorm(DIM)]
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def mlp(self, x: mx.array) -> mx.array:
        """[.., DIM] -> [.., DIM]."""
        return self.down(nn.gelu(self.up(self.norms[1](x))))

    def __call__(self, x: mx.array) -> mx.array:
        """[B, S, DIM] -> [B, S, DIM]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm = nn.RMSNorm(DIM)

    def __call__(self, tokens: mx.array) -> mx.array:
        """[B, S] -> [B, S, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.as_linear(self.norm(x))

    def step(
        self, tokens: mx.array, policy: veloxfn.Policy[Any], states: list[Any], offset: int
    ) -> tuple[mx.array, list[Any]]:
        """One block of tokens [B, S] with one state per layer."""
        x, after = self.embedding(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            y, state = block.attention.step(block.norms[0](x), policy, state, offset)
            x = x + y
            x = x + block.mlp(x)
            after.append(state)
        return self.embedding.as_linear(self.norm(x)), after


def init_states(policy: veloxfn.Policy[Any], batch: int) -> list[Any]:
    """One state per layer, its noise streams named by layer and head."""
    return [
        policy.init_state(batch * KV_HEADS, HEAD_DIM, dtype=mx.float32, streams=veloxfn.streams(batch, KV_HEADS, layer))
        for layer in range(LAYERS)
    ]


def train(text: mx.array, steps: int, *, batch: int = 2) -> Decoder:
    """Fit the next byte with AdamW."""
    mx.random.seed(0)
    model = Decoder()
    optimizer = optim.AdamW(learning_rate=optim.cosine_decay(4e-3, steps))

    def loss(model: Decoder, rows: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    for index in range(steps):
        starts = mx.random.randint(0, text.size - LENGTH, (batch, 1))
        value, gradients = step(model, text[starts + mx.arange(LENGTH + 1)])
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if index % 50 == 0 or index == steps - 1:
            print(f"step {index:4d}  {value.item() / math.log(2):.2f} bits per byte", flush=True)
    return model


def read(model: Decoder, policy: veloxfn.Policy[Any], tokens: mx.array) -> tuple[mx.array, list[Any]]:
    """Feed tokens [B, T] in blocks; the logits [B, T, 256] of all and the states."""
    states, logits = init_states(policy, tokens.shape[0]), []
    for start in range(0, tokens.shape[1], BLOCK):
        part, states = model.step(tokens[:, start : start + BLOCK], policy, states, start)
        logits.append(part)
        mx.eval(part, states)
    return mx.concatenate(logits, axis=1), states


def bits_per_byte(logits: mx.array, tokens: mx.array) -> float:
    """Mean surprise of tokens[1:] under logits[:-1]."""
    return nn.losses.cross_entropy(logits[:, :-1], tokens[:, 1:], reduction="mean").item() / math.log(2)


def write(model: Decoder, policy: veloxfn.Policy[Any], prompt: mx.array, count: int) -> tuple[bytes, list[Any]]:
    """`count` bytes drawn after the prompt [1, T], one by one."""
    logits, states = read(model, policy, prompt)
    written: list[int] = []
    for index, key in enumerate(mx.random.split(mx.random.key(0), count)):
        drawn = mx.random.categorical(logits[:, -1:] / TEMPERATURE, key=key)
        written.append(int(drawn.item()))
        logits, states = model.step(drawn, policy, states, prompt.shape[1] + index)
    return bytes(written), states


def main(arguments: list[str] | None = None) -> None:
    """Train, then decode with and without a budget."""
    parser = argparse.ArgumentParser(description="A small decoder whose KV cache stays at a fixed budget.")
    parser.add_argument("--method", choices=list(veloxfn.METHODS), default="h2o")
    parser.add_argument("--budget", type=int, default=64, help="rows kept per kv head and layer")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--max-tokens", type=int, default=160, help="bytes to write")
    options = parser.parse_args(arguments)
    for name, count in (("--steps", options.steps), ("--max-tokens", options.max_tokens)):
        if count < 1:
            parser.error(f"{name} must be >= 1, got {count}")
    try:
        policy = veloxfn.policy(veloxfn.METHODS[options.method].Config(budget=options.budget))
        window = veloxfn.policy(veloxfn.streaming_llm.Config(budget=options.budget, sink=0))
    except ValueError as error:
        parser.error(str(error))

    text = mx.array(list(b"".join(path.read_bytes() for path in sorted(TEXTS.glob("*.txt")))))
    held_out = text[-8 * LENGTH :].reshape(8, LENGTH)  # eight passages
    model = train(text[: -8 * LENGTH], options.steps)
    print(f"{sum(leaf.size for _, leaf in tree_flatten(model.parameters())):,} parameters\n")

    print(f"{held_out.shape[0]} held-out passages of {LENGTH} bytes, budget {options.budget}:")
    for name, logits in (
        ("full cache", model(held_out)),
        (options.method, read(model, policy, held_out)[0]),
        ("sliding window", read(model, window, held_out)[0]),
    ):
        print(f"  {name:16s}{bits_per_byte(logits, held_out):.3f} bits per byte")

    prompt = held_out[:1]
    written, states = write(model, policy, prompt, options.max_tokens)
    print(f"\n...{bytes(prompt[0, -60:].tolist()).decode(errors='replace')}|{written.decode(errors='replace')}\n")
    kept, seen = veloxfn.kept_bytes(states[0]), veloxfn.full_bytes(states[0])
    print(
        f"{veloxfn.tokens_seen(states[0])[0].item()} tokens seen, {veloxfn.tokens_kept(states[0])[0].item()} kept; "
        f"{LAYERS * kept.item():,} bytes for {LAYERS * seen.item():,} of a full cache "
        f"({veloxfn.compression_ratio(states[0]).item():.1f} to 1)"
    )


if __name__ == "__main__":
    main()
