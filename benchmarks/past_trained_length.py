"""Running past the length that a model was trained on: which caches keep its perplexity flat?

    python benchmarks/past_trained_length.py [--quick] [--steps N] [--json FILE] [--plot FILE]

Trains a small byte-level transformer (RoPE, full attention) on rows of 128 bytes, each behind the same start token, and
reads the held-out ends of six texts, 2048 bytes each, byte by byte: 16 times the trained length. The full cache meets
positions and distances that training never showed. Under a budget of 96 rows with contiguous placement the model never
sees a position beyond 96, however long it runs. Reported: perplexity per byte in stretches of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import machine
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import reporting
from mlx.utils import tree_flatten

import veloxfn
from veloxfn import Absolute, Policy, h2o, streaming_llm
from veloxfn.placement import Contiguous, Rope

TEXTS = Path(__file__).parent / "texts"
START = 0  # a byte that no text holds, in front of every row: what it is trained to be, the first token of a row
HEADS, HEAD_DIM, SINK = 2, 32, 4
ROPE = Rope(HEAD_DIM)
FULL_CACHE = "full cache"


class Plan(NamedTuple):
    """Sizes of the model and of the experiment."""

    length: int = 128  # trained on, and of a stretch that is reported
    budget: int = 96
    stretches: int = 16
    layers: int = 3
    steps: int = 1000
    batch: int = 8

    @property
    def read(self) -> int:
        """Bytes of a held-out row."""
        return self.length * self.stretches


FULL, QUICK = Plan(), Plan(length=32, budget=24, layers=2, steps=400)


class Attention(nn.Module):
    """Attention with rotary positions; keys and values pass through a veloxfn state."""

    def __init__(self) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def heads(self, x: mx.array, offset: int | mx.array) -> list[mx.array]:
        """Rotated queries and keys, and values, [B, H, S, D] each."""
        split = self.qkv(x).reshape(*x.shape[:2], 3 * HEADS, HEAD_DIM).swapaxes(1, 2)
        queries, keys, values = mx.split(split, 3, axis=1)
        turned = [
            mx.fast.rope(part, HEAD_DIM, traditional=False, base=ROPE.base, scale=1.0, offset=offset)
            for part in (queries, keys)
        ]
        return [*turned, values]

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Causal at the lower right: [B, H, S, D] over [B, H, n, D] -> [B, S, H * D]."""
        mask = "causal" if queries.shape[2] > 1 else None
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=HEAD_DIM**-0.5, mask=mask)
        return self.out(y.swapaxes(1, 2).flatten(2))

    def step(self, x: mx.array, policy: Policy[Any], state: Any) -> tuple[mx.array, Any]:
        """A block [B, S, H * D] under a budget: place, absorb, attend, evict."""
        batch = x.shape[0]
        position = veloxfn.next_position(policy.config, state)[::HEADS]  # the heads of a sequence agree
        queries, keys, values = self.heads(x, position)
        state = policy.absorb(state, keys.flatten(0, 1), values.flatten(0, 1))
        y = self.attend(queries, *(mx.unflatten(kept, 0, (batch, HEADS)) for kept in policy.candidates(state)))
        asked = queries.flatten(0, 1)[:, None] if policy.config.needs_queries else None
        return y, policy.evict(state, queries=asked)


class Model(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(256, dim)
        self.attention = [Attention() for _ in range(layers)]
        self.up = [nn.Linear(dim, 4 * dim) for _ in range(layers)]
        self.down = [nn.Linear(4 * dim, dim) for _ in range(layers)]
        self.norms = [nn.RMSNorm(dim) for _ in range(2 * layers + 1)]

    def _pass(self, tokens: mx.array, attend: Callable[[int, mx.array], mx.array]) -> mx.array:
        x = self.embedding(tokens)
        for layer in range(len(self.attention)):
            x = x + attend(layer, self.norms[2 * layer](x))
            x = x + self.down[layer](nn.gelu_approx(self.up[layer](self.norms[2 * layer + 1](x))))
        return self.embedding.as_linear(self.norms[-1](x))

    def __call__(self, tokens: mx.array) -> mx.array:
        """[B, S] -> [B, S, 256], the whole text at once with a full cache."""

        def attend(layer: int, x: mx.array) -> mx.array:
            return self.attention[layer].attend(*self.attention[layer].heads(x, 0))

        return self._pass(tokens, attend)

    def step(self, tokens: mx.array, policy: Policy[Any], states: list[Any]) -> tuple[mx.array, list[Any]]:
        """One block of tokens [B, S] with one state per layer."""
        after = list(states)

        def attend(layer: int, x: mx.array) -> mx.array:
            y, after[layer] = self.attention[layer].step(x, policy, after[layer])
            return y

        return self._pass(tokens, attend), after


def texts(plan: Plan) -> tuple[mx.array, mx.array]:
    """Bytes to train on [T], and the ends of the texts, a start token in front: [6, 1 + read]."""
    training, held_out = [], []
    for path in sorted(TEXTS.glob("*.txt")):
        content = path.read_bytes()
        training += content[: -plan.read]
        held_out.append([START, *content[-plan.read :]])
    return mx.array(training), mx.array(held_out)


def surprise(logits: mx.array, tokens: mx.array) -> mx.array:
    """Nats of tokens[:, 1:] under the logits before them: [B, T - 1]."""
    return nn.losses.cross_entropy(logits[:, : tokens.shape[1] - 1], tokens[:, 1:])


def train(plan: Plan, training: mx.array) -> Model:
    """Fit the next byte of rows of the trained length with AdamW."""
    mx.random.seed(0)
    model = Model(plan.layers)
    optimizer = optim.AdamW(learning_rate=optim.cosine_decay(4e-3, plan.steps), weight_decay=0.1)
    places = mx.arange(plan.length)

    def loss(model: Model, rows: mx.array) -> mx.array:
        return mx.mean(surprise(model(rows[:, :-1]), rows))

    gradient = nn.value_and_grad(model, loss)
    state = [model.state, optimizer.state]

    def step(rows: mx.array) -> mx.array:
        value, gradients = gradient(model, rows)
        optimizer.update(model, gradients)
        return value

    compiled = mx.compile(step, inputs=state, outputs=state)
    for index in range(plan.steps):
        starts = mx.random.randint(0, training.size - plan.length, (plan.batch, 1))
        rows = mx.concatenate([mx.full(starts.shape, START), training[starts + places]], axis=1)
        value = compiled(rows)
        mx.eval(state, value)
        if index % 100 == 0 or index == plan.steps - 1:
            print(f"step {index:4d}: perplexity {math.exp(value.item()):.2f}", flush=True)
    return model


def methods(plan: Plan) -> dict[str, Policy[Any]]:
    """The caches with a budget, by name."""
    contiguous = Contiguous(ROPE)

    def streaming(placement: Any, sink: int) -> Policy[Any]:
        return veloxfn.policy(streaming_llm.Config(budget=plan.budget, sink=sink, placement=placement))

    return {
        "streaming_llm, contiguous": streaming(contiguous, SINK),
        "streaming_llm, absolute": streaming(Absolute(), SINK),
        "sliding window, contiguous": streaming(contiguous, 0),
        "sliding window, absolute": streaming(Absolute(), 0),
        "h2o, contiguous": veloxfn.policy(h2o.Config(budget=plan.budget, sink=SINK, placement=contiguous)),
    }


def read(model: Model, policy: Policy[Any], tokens: mx.array) -> tuple[mx.array, int]:
    """Logits [B, T, 256] of tokens [B, T] under a budget: what fits in one block, then token by token.

    Also the highest position that a token was rotated at.
    """
    batch, budget = tokens.shape[0], policy.config.budget
    states = [
        policy.init_state(batch * HEADS, HEAD_DIM, dtype=mx.float32, streams=veloxfn.streams(batch, HEADS, layer))
        for layer in range(len(model.attention))
    ]
    logits, states = model.step(tokens[:, :budget], policy, states)
    told, step = [logits], mx.compile(lambda now, states: model.step(now, policy, states))
    highest = mx.array(min(budget, tokens.shape[1]) - 1)
    mx.eval(logits, states)
    for place in range(budget, tokens.shape[1]):
        highest = mx.maximum(highest, veloxfn.next_position(policy.config, states[0]).max())
        logits, states = step(tokens[:, place : place + 1], states)
        mx.eval(logits, states, highest)
        told.append(logits)
    return mx.concatenate(told, axis=1), int(highest.item())


class Result(NamedTuple):
    """One cache on all texts."""

    method: str
    nats: list[list[float]]  # [texts, stretches], mean surprise per byte
    highest_position: int  # that the model's rotary embedding was asked for

    @property
    def perplexity(self) -> list[float]:
        """Per byte, of each stretch."""
        return [math.exp(sum(stretch) / len(stretch)) for stretch in zip(*self.nats, strict=True)]

    @property
    def late(self) -> float:
        """Perplexity past the trained length, all stretches but the first."""
        flat = [nats for text in self.nats for nats in text[1:]]
        return math.exp(sum(flat) / len(flat))


def measure(model: Model, plan: Plan, tokens: mx.array) -> list[Result]:
    """The full cache, then every cache with a budget."""

    def result(method: str, logits: mx.array, highest: int) -> Result:
        nats = mx.mean(mx.unflatten(surprise(logits, tokens), 1, (plan.stretches, plan.length)), axis=2)
        return Result(method, nats.tolist(), highest)

    seen = tokens[:, :-1]
    results = [result(FULL_CACHE, model(seen), plan.read - 1)]
    for name, policy in methods(plan).items():
        results.append(result(name, *read(model, policy, seen)))
    return results


def against_full(results: list[Result]) -> dict[str, reporting.Interval]:
    """Nats per byte past the trained length minus those of the full cache in its first stretch, over the texts."""
    trained = [text[0] for text in results[0].nats]
    return {
        result.method: reporting.mean(
            [sum(text[1:]) / len(text[1:]) - first for text, first in zip(result.nats, trained, strict=True)]
        )
        for result in results
    }


def tabulate(results: list[Result], plan: Plan) -> None:
    """Print perplexities of some stretches."""
    shown = [index for index in (0, 1, 3, 7, 15) if index < plan.stretches]
    columns = [f"bytes {i * plan.length} to {(i + 1) * plan.length}" for i in shown]
    print(reporting.head("cache", *columns, "all past the trained length", "highest position"))
    for result in results:
        figures = [f"{result.perplexity[index]:.2f}" for index in shown]
        print(reporting.row(result.method, *figures, f"{result.late:.2f}", result.highest_position))


def report(results: list[Result], plan: Plan, parameters: int) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    excess = against_full(results)
    return {
        "plan": {**plan._asdict(), "sink": SINK, "heads": HEADS, "head_dim": HEAD_DIM, "parameters": parameters},
        "results": [
            {
                **result._asdict(),
                "perplexity": result.perplexity,
                "late": result.late,
                "excess_nats": excess[result.method]._asdict(),
            }
            for result in results
        ],
    }


def plot(results: list[Result], plan: Plan, path: Path) -> None:
    """Perplexity over the bytes read."""
    drawn, ((axes,),) = reporting.figure(1, 1, width=7.5, height=4)
    places = [(index + 0.5) * plan.length for index in range(plan.stretches)]
    for result in results:
        absolute = result.method == FULL_CACHE or "absolute" in result.method
        axes.plot(
            places, result.perplexity, "--" if absolute else "-", label=result.method, zorder=3 if absolute else 2
        )
    axes.axvline(plan.length, color="#b04a3a", linewidth=1)
    axes.set_xlabel("bytes read (red: trained length)")
    axes.set_ylabel("perplexity per byte")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8)
    reporting.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="trained length 32, 2 layers, 400 steps, 512 bytes")
    parser.add_argument("--steps", type=int, help="training steps")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.steps is not None:
        if options.steps < 1:
            parser.error(f"--steps must be >= 1, got {options.steps}")
        plan = plan._replace(steps=options.steps)
    training, held_out = texts(plan)
    model = train(plan, training)
    parameters = sum(leaf.size for _, leaf in tree_flatten(model.parameters()))
    print(
        f"{parameters:,} parameters, {training.size:,} bytes to train on, {len(held_out)} texts of {plan.read} to read"
    )
    results = measure(model, plan, held_out)
    tabulate(results, plan)
    reporting.write(options.json, **report(results, plan, parameters))
    if options.plot:
        plot(results, plan, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
