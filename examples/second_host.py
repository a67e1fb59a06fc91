"""A model of your own with the adapter's caches: no mlx_lm anywhere.

    python examples/second_host.py --budget 32

The model does what any decoder with a KV cache does, and calls `attention`, which shows its queries to the cache:

    keys, values = cache.update_and_fetch(keys, values)     # everything kept, and this block
    y = attention(queries, keys, values, cache=cache, scale=scale, mask=mask)

The weights are random, so the tokens mean nothing; the table shows what the caches hold at the end.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, attention, describe

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TOKENS = 64, 8, 2, 16, 3, 100


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, then a gated MLP, each on a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.rope = nn.RoPE(HEAD_DIM)
        self.norms = [nn.RMSNorm(DIM), nn.RMSNorm(DIM)]
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def heads(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries [B, Hq, S, D] and keys [B, Hkv, S, D], and values [B, Hkv, S, D]."""
        split = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], -1, HEAD_DIM).swapaxes(1, 2)
        queries, keys, values = mx.split(split, [HEADS, HEADS + KV_HEADS], axis=1)
        return self.rope(queries, offset=offset), self.rope(keys, offset=offset), values

    def after(self, x: mx.array, y: mx.array) -> mx.array:
        """Residual x [B, S, DIM], attention y [B, Hq, S, D] -> [B, S, DIM]."""
        x = x + self.out(y.swapaxes(1, 2).flatten(2))
        return x + self.down(nn.silu(self.up(self.norms[1](x))))

    def __call__(self, x: mx.array, cache: Any, mask: Any) -> mx.array:
        """[B, S, DIM] -> [B, S, DIM]."""
        queries, keys, values = self.heads(x, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        y = attention(queries, keys, values, cache=cache, scale=HEAD_DIM**-0.5, mask=mask)
        return self.after(x, y)


class Decoder(nn.Module):
    """Tokens in, logits over the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, DIM)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.norm = nn.RMSNorm(DIM)

    def __call__(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """[B, S] -> [B, S, TOKENS]."""
        x, mask = self.embedding(tokens), caches[0].make_mask(tokens.shape[1])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, mask)
        return self.embedding.as_linear(self.norm(x))


def make_caches(policy: veloxfn.Policy[Any]) -> list[EvictingCache]:
    """One cache per layer."""
    return [EvictingCache(policy, layer=layer, owner="the example") for layer in range(LAYERS)]


def generate(model: Decoder, caches: list[EvictingCache], prompt: mx.array, count: int) -> list[int]:
    """`count` tokens drawn after the prompt [S]."""
    tokens, logits = [], model(prompt[None], caches)
    for key in mx.random.split(mx.random.key(0), count):
        tokens.append(int(mx.random.categorical(logits[0, -1], key=key).item()))
        logits = model(mx.array([tokens[-1:]]), caches)
    return tokens


def main(arguments: list[str] | None = None) -> None:
    """Write a few tokens under a budget."""
    parser = argparse.ArgumentParser(description="The adapter's caches in a model that is not mlx_lm's.")
    parser.add_argument("--budget", type=int, default=32, help="rows kept per kv head and layer")
    parser.add_argument("--max-tokens", type=int, default=40, help="tokens to write")
    options = parser.parse_args(arguments)
    mx.random.seed(0)
    caches = make_caches(veloxfn.policy(veloxfn.h2o.Config(budget=options.budget, age_normalised=True)))
    print(*generate(Decoder(), caches, mx.arange(60), options.max_tokens))
    print(describe(caches))
    print("mlx_lm is", "loaded" if "mlx_lm" in sys.modules else "not loaded")


if __name__ == "__main__":
    main()
