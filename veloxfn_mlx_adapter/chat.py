"""What `veloxfn chat` does: a conversation whose caches stay within the budget, however long it gets."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from veloxfn import Contiguous, Retention
from veloxfn_mlx_adapter import generation
from veloxfn_mlx_adapter.diagnostics import method_name

__all__ = ["Manner", "chat", "turn_tokens"]

_HELP = "q quits, r forgets the conversation, h shows this; anything else is said to the model"
_STAND_IN = "veloxfn-answer"  # for an answer, in a rendered template


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How to answer."""

    system: str | None
    max_tokens: int
    temp: float
    top_p: float
    seed: int
    chunk: int  # prompt tokens per call


@dataclass
class _Talk:
    """A conversation so far: its caches, and totals over all that was said, also before it was forgotten."""

    caches: list[Any]
    opened: bool = False
    closed_by: int | None = None  # the token that ended the last answer; None = it was cut short
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def count(self, last: Any) -> None:
        self.prompt_tokens += last.prompt_tokens
        self.prompt_seconds += last.prompt_tokens / last.prompt_tps
        self.tokens += last.generation_tokens
        self.seconds += last.generation_tokens / last.generation_tps

    def total(self) -> generation.Answer:
        rates = (self.prompt_tokens / (self.prompt_seconds or 1), self.tokens / (self.seconds or 1))
        return generation.Answer("", self.prompt_tokens, rates[0], self.tokens, rates[1])


def chat(model: Any, tokenizer: Any, config: Retention, manner: Manner, *, out: TextIO) -> None:
    """Answer the lines of stdin until there are no more, or one is "q"; then say what the caches hold.

    Args:
        model: an mlx_lm model.
        tokenizer: its tokenizer.
        config: what `generation.fitted` returned.
        manner: how to answer.
        out: where answers and report go.

    Raises:
        UsageError: a setting that does not fit the model, or input that is no text.
    """
    mx.random.seed(manner.seed)
    trained = _trained_length(model, config)
    with generation.attached(model, config):
        talk = _Talk(make_prompt_cache(model))
        if sys.stdin.isatty():
            print(_HELP, file=out, flush=True)
        for line in _lines():
            if line == "q":
                break
            if line == "h":
                print(_HELP, file=out, flush=True)
            elif line == "r":
                talk.caches, talk.opened, talk.closed_by = make_prompt_cache(model), False, None
                print("forgotten", file=out, flush=True)
            else:
                tokens = turn_tokens(
                    tokenizer, line, system=manner.system, opened=talk.opened, closed_by=talk.closed_by
                )
                _answer(model, tokenizer, talk, tokens, manner, out)
                if trained is not None and max(cache.size() for cache in talk.caches) > trained:
                    print(f"note: more than the {trained} tokens that the model was trained on; r starts anew, "
                          f"--contiguous goes on", file=sys.stderr)  # fmt: skip
                    trained = None
    print(f"\n{generation.report(talk.caches, talk.total(), method_name(config))}", file=out, flush=True)


def turn_tokens(tokenizer: Any, text: str, *, system: str | None, opened: bool, closed_by: int | None) -> list[int]:
    """What the caches have to read for the next turn: only what they do not hold yet.

    Args:
        tokenizer: an mlx_lm tokenizer.
        text: what is said.
        system: said before everything else.
        opened: whether the caches hold turns already.
        closed_by: the token that ended the last answer; None = it was cut short.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        return list(tokenizer.encode(text, add_special_tokens=not opened))
    turn = {"role": "user", "content": text}
    if not opened:
        before = [] if system is None else [{"role": "system", "content": system}]
        return list(tokenizer.apply_chat_template([*before, turn], add_generation_prompt=True))
    earlier = [{"role": "user", "content": "."}, {"role": "assistant", "content": _STAND_IN}]
    rendered = tokenizer.apply_chat_template([*earlier, turn], add_generation_prompt=True, tokenize=False)
    _, found, rest = rendered.partition(_STAND_IN)
    if not found:  # a template that leaves answers out: the turn alone
        return list(tokenizer.apply_chat_template([turn], add_generation_prompt=True))
    if closed_by is not None:
        rest = rest.removeprefix(tokenizer.decode([closed_by]))
    return list(tokenizer.encode(rest, add_special_tokens=False))


def _answer(model: Any, tokenizer: Any, talk: _Talk, tokens: list[int], manner: Manner, out: TextIO) -> None:
    """Stream one answer to `out`; the caches go on from there."""
    last = None
    progress = generation.show_progress if len(tokens) > manner.chunk else lambda *_: None
    with generation.said_to_the_user(), _interrupts() as interrupted:
        for last in stream_generate(
            model,
            tokenizer,
            tokens,
            max_tokens=manner.max_tokens,
            sampler=make_sampler(temp=manner.temp, top_p=manner.top_p),
            prompt_cache=talk.caches,
            prefill_step_size=manner.chunk,
            prompt_progress_callback=progress,
        ):
            out.write(last.text)
            out.flush()
            if interrupted:
                break
    out.write("\n")
    assert last is not None  # stream_generate yields at least its closing response
    talk.count(last)
    talk.opened, talk.closed_by = True, last.token if last.finish_reason == "stop" else None


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect the first interrupt, to stop between tokens, where all layers have seen the same; the next one raises."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(signum: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """What is said: lines of stdin that are not empty, asked for on a terminal."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise generation.UsageError(f"stdin: not UTF-8 text: {error.reason}") from error
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()


def _trained_length(model: Any, config: Retention) -> int | None:
    """Tokens after which the model degrades; None = never with these caches, or not known."""
    if isinstance(getattr(config, "scorer", config).placement, Contiguous):
        return None
    length = getattr(getattr(model, "args", None), "max_position_embeddings", None)
    return length if isinstance(length, int) else None
