"""What `veloxfn generate` does, partly shared by `chat` and `serve`: answer under a budget, tell what caches did."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import veloxfn
from veloxfn import Contiguous, Retention
from veloxfn_mlx_adapter.demo import load_demo
from veloxfn_mlx_adapter.diagnostics import diagnostics
from veloxfn_mlx_adapter.method_options import flag_of
from veloxfn_mlx_adapter.prompt_cache import Attachment, attach, make_prompt_cache, stock_caches
from veloxfn_mlx_adapter.ropes import rope_of

_RETENTION = [field.name for field in dataclasses.fields(Retention)]

__all__ = [
    "Answer",
    "Request",
    "UsageError",
    "answer",
    "attached",
    "caches_for",
    "config_for",
    "fitted",
    "load_model",
    "not_loaded",
    "report",
    "said_to_the_user",
    "show_progress",
    "tokens_of",
]


class UsageError(Exception):
    """The request cannot be served as it was written; the message is one line for the user."""


@contextmanager
def said_to_the_user() -> Iterator[None]:
    """Whatever value is refused inside is a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to sample its answer."""

    prompt: str
    max_tokens: int
    temp: float
    seed: int
    chunk: int  # prompt tokens per call


@dataclass(frozen=True)
class Answer:
    """What mlx_lm measured while it answered."""

    text: str
    prompt_tokens: int
    prompt_rate: float  # tokens per second
    tokens: int
    rate: float


def config_for(method: str, settings: dict[str, Any], *, scorer: str | None = None) -> Retention:
    """The Config of a method with the given settings, arguments as those of `veloxfn.policy_for`.

    Raises:
        UsageError: what `policy_for` refuses, said with the options of the command line.
    """
    try:
        return veloxfn.policy_for(method, scorer=scorer, **settings).config
    except veloxfn.SettingError as error:
        raise UsageError(f"{flag_of(error.setting)}: {error.reason}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def load_model(name: str | None) -> tuple[Any, Any]:
    """The demo model, or an mlx_lm folder or hub id.

    Raises:
        UsageError: it cannot be loaded.
    """
    try:
        if name is None:
            return load_demo()
        import mlx_lm

        model, tokenizer = mlx_lm.load(name)[:2]
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from error
    except Exception as error:  # a hub id can fail in many ways, none of them a fault here
        raise not_loaded(name or "", error) from error
    return model, tokenizer


def not_loaded(name: str, error: Exception) -> UsageError:
    """What to say of a model that does not load."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "folder" if Path(name).is_dir() else "folder (there is none of that name) or hub id"
    return UsageError(f"--model {name}: no mlx_lm {kind} that loads: {first}")


def tokens_of(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as tokens, through the tokenizer's chat template where it has one."""
    if getattr(tokenizer, "has_chat_template", False):
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def answer(
    model: Any,
    tokenizer: Any,
    caches: list[Any],
    prompt: Sequence[int],
    request: Request,
    *,
    out: TextIO,
    progress: Callable[[int, int], None],
) -> Answer:
    """Stream the answer to `out`.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        caches: what `make_prompt_cache` returned.
        prompt: what `tokens_of` returned.
        request: how to sample.
        out: where the text goes, piece by piece.
        progress: called with prompt tokens read and their total.

    Raises:
        UsageError: a setting that shows only now not to fit the model.
    """
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    mx.random.seed(request.seed)
    pieces, last = [], None
    with said_to_the_user():  # a setting that does not fit the model, such as shared_heads
        for last in stream_generate(
            model,
            tokenizer,
            list(prompt),
            max_tokens=request.max_tokens,
            sampler=make_sampler(temp=request.temp),
            prompt_cache=caches,
            prefill_step_size=request.chunk,
            prompt_progress_callback=progress,
        ):
            pieces.append(last.text)
            out.write(last.text)
            out.flush()
    out.write("\n")
    assert last is not None  # stream_generate yields at least its closing response
    return Answer("".join(pieces), last.prompt_tokens, last.prompt_tps, last.generation_tokens, last.generation_tps)


def report(caches: list[Any], said: Answer, method: str) -> str:
    """What the caches hold now against a cache that keeps everything, and how fast it went."""
    layers = diagnostics(caches)
    kept, full = sum(layer.kept_bytes for layer in layers), sum(layer.full_bytes for layer in layers)
    budgets = sorted({layer.layer_budget for layer in layers})
    budget = f"{budgets[0]}" if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}"
    rows = sorted({layer.tokens_kept for layer in layers})
    held = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
    others = len(caches) - len(layers)
    untouched = f"; {others} other layers keep their own cache" if others else ""
    lines = [
        ("method", f"{method}, budget {budget} rows per kv head"),
        ("tokens seen", f"{max(layer.tokens_seen for layer in layers)}"),
        ("rows kept", f"{held} per kv head in {len(layers)} layers{untouched}"),
        ("cache bytes", f"{kept:,} of {full:,} that a full cache would hold"),
        ("compression", f"{full / kept if kept else 1.0:.2f} x"),
        ("prompt", f"{said.prompt_tokens} tokens, {said.prompt_rate:.1f} tokens/s"),
        ("decode", f"{said.tokens} tokens, {said.rate:.1f} tokens/s"),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def fitted(config: Retention, model: Any, *, anneal_from: int | None, contiguous: bool) -> Retention:
    """The config with what only the model and the prompt know.

    Args:
        config: what `config_for` returned.
        model: an mlx_lm model.
        anneal_from: where Keyformer's temperature starts to change, with noise on logits: the prompt's length, so that
            the prompt is scored at the first temperature. None = as the config says.
        contiguous: see kept rows without gaps, with the rotary embedding of the model's first evicting layer.

    Raises:
        UsageError: contiguous, and the model's rotary embedding is not known.
    """
    changes: dict[str, Any] = {}
    full = [i for i, cache in enumerate(stock_caches(model)) if type(cache) is KVCache]
    if contiguous:
        try:
            changes["placement"] = Contiguous(rope_of(model, full[0] if full else 0))
        except ValueError as error:
            raise UsageError(str(error)) from error
    ranking: Retention = getattr(config, "scorer", config)
    if anneal_from is not None and getattr(ranking, "noise", None) == "logit":
        changes["anneal_from"] = anneal_from
    ranking = dataclasses.replace(ranking, **changes)
    if not hasattr(config, "scorer"):
        return ranking
    layers = max(1, len(full))  # a model without such layers is refused with the caches
    spread: dict[str, Any] = dict.fromkeys(_RETENTION) | {"scorer": ranking, "layers": layers}  # None = the scorer's
    return dataclasses.replace(config, **spread)


def caches_for(model: Any, config: Retention) -> list[Any]:
    """Eviction caches for all layers of full attention.

    Raises:
        UsageError: the model has none, or does not show its queries to a method that ranks by them.
    """
    with said_to_the_user():
        return make_prompt_cache(model, veloxfn.policy(config))


def attached(model: Any, config: Retention) -> Attachment:
    """Make eviction caches what mlx_lm gets from the model.

    Raises:
        UsageError: as `caches_for`.
    """
    with said_to_the_user():
        return attach(model, veloxfn.policy(config))


def show_progress(read: int, total: int) -> None:
    """Rewrite one line of stderr on a terminal; elsewhere write one line per chunk."""
    end = "\r" if sys.stderr.isatty() and read < total else "\n"
    print(f"reading the prompt: {read} of {total} tokens", end=end, file=sys.stderr, flush=True)
