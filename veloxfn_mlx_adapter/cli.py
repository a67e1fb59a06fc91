"""The `veloxfn` command."""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mlx.core as mx

import veloxfn
from veloxfn import Retention
from veloxfn.cadence import most_tokens
from veloxfn_mlx_adapter import generation
from veloxfn_mlx_adapter.demo import DEMO_NAME
from veloxfn_mlx_adapter.method_options import add_method_options, settings_of
from veloxfn_mlx_adapter.prompts import DEFAULT_PROMPT

__all__ = ["main"]

DEFAULT_BUDGET = 256
LONG_BUDGET = 1024  # of conversations

Number = TypeVar("Number", int, float)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None = the process's.

    Returns:
        The exit code: 0, or 130 when interrupted. Bad input exits with 2 and one line on stderr.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options, unknown = _parser(serving=words[:1] == ["serve"]).parse_known_args(words)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments is None:
        _prefer_openblas()
    try:
        options.run(options)
    except generation.UsageError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more: no second error at exit
    return 0


def _prefer_openblas() -> None:
    """Start again with OpenBLAS in front, where it is installed.

    The BLAS inside MLX's Linux CPU wheel is the plain reference one: prompts take about ten times as long. An
    LD_PRELOAD that is set already, even to nothing, is left alone.
    """
    if sys.platform != "linux" or mx.default_device().type != mx.cpu or "LD_PRELOAD" in os.environ:
        return
    library = ctypes.util.find_library("openblas")
    if library is None:
        print("note: MLX reads prompts about ten times faster on this CPU with OpenBLAS installed", file=sys.stderr)
        return
    os.environ["LD_PRELOAD"] = library
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _parser(*, serving: bool) -> _Parser:
    """Options of all commands; those of mlx_lm's server only if it is to serve."""
    parser = _Parser(prog="veloxfn", description="KV-cache eviction for MLX decoders.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    generate = commands.add_parser(
        "generate",
        help="answer a prompt under a cache budget",
        description="Answer a prompt under a cache budget, then say what the cache kept.",
    )
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="default: a built-in text that is longer than the budget")
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a text file")
    _add_model(generate)
    _add_caches(generate, budget=DEFAULT_BUDGET)
    _add_sampling(generate)
    generate.set_defaults(run=_generate, parser=generate)
    chat = commands.add_parser(
        "chat",
        help="talk to a model under a cache budget",
        description="Answer the lines of stdin, each after all that was said before, under a cache budget. "
        "q quits, r forgets the conversation, h shows this help.",
    )
    chat.add_argument("--system-prompt", metavar="TEXT", help="said before everything else")
    _add_model(chat)
    _add_caches(chat, budget=LONG_BUDGET)
    _add_sampling(chat)
    chat.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (1 = off)")
    chat.set_defaults(run=_chat, parser=chat)
    server = _server_flags() if serving else None
    serve = commands.add_parser(
        "serve",
        help="mlx_lm's server, with caches under a budget",
        description="mlx_lm's OpenAI-compatible server with all its flags; the caches of every model that it loads "
        f"evict. Without --model: {DEMO_NAME}.",
        parents=[] if server is None else [server],
        add_help=server is None,
    )
    _add_caches(serve, budget=LONG_BUDGET)
    serve.set_defaults(run=_serve, parser=serve)
    return parser


def _server_flags() -> Any:
    from veloxfn_mlx_adapter import serving

    return serving.flags()


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help=f"mlx_lm folder or hub id; default: {DEMO_NAME}")


def _add_caches(parser: argparse.ArgumentParser, *, budget: int) -> None:
    parser.add_argument(
        "--method", choices=list(veloxfn.METHODS), default="h2o", help="what decides which rows stay (h2o)"
    )
    parser.add_argument(
        "--budget", type=int, default=budget, metavar="N", help=f"rows kept per kv head and layer ({budget})"
    )
    parser.add_argument(
        "--scorer",
        choices=[name for name in veloxfn.METHODS if name != "pyramidkv"],
        help="pyramidkv: the method that ranks inside a layer (snapkv)",
    )
    parser.add_argument(
        "--contiguous",
        action="store_true",
        help="see kept rows without gaps, so that generation can run past the model's trained length",
    )
    add_method_options(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=100, help="longest answer (100)")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens read per call (512)")
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (0 = most likely token)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")


def _config(options: argparse.Namespace) -> Retention:
    """The Config that was asked for."""
    settings = {"budget": options.budget} | settings_of(options)
    scorer = options.scorer
    if options.method == "pyramidkv" and "taper" in settings:
        scorer = scorer or "h2o"
    if "h2o" in (options.method, scorer) and settings.get("decay", 1.0) == 1.0:
        # better than the paper's plain sums where a prompt arrives in chunks
        settings = {"age_normalised": True} | settings
    return generation.config_for(options.method, settings, scorer=scorer)


def _sampling(options: argparse.Namespace, config: Retention) -> dict[str, Any]:
    """What `_add_sampling` added, as the fields of a request."""
    return {
        "max_tokens": _at_least("--max-tokens", options.max_tokens, 1),
        "chunk": min(_at_least("--chunk", options.chunk, 1), most_tokens(config)),
        "seed": _at_least("--seed", options.seed, 0) % 2**64,
        "temp": _at_least("--temp", options.temp, 0),
    }


def _generate(options: argparse.Namespace) -> None:
    config = _config(options)
    request = generation.Request(
        prompt=_prompt(options.prompt, options.prompt_file),
        **_sampling(options, config),
    )
    model, tokenizer = generation.load_model(options.model)
    tokens = generation.tokens_of(tokenizer, request.prompt)
    prompt_end = None if "anneal_from" in settings_of(options) else len(tokens)
    config = generation.fitted(config, model, anneal_from=prompt_end, contiguous=options.contiguous)
    caches = generation.caches_for(model, config)
    said = generation.answer(
        model, tokenizer, caches, tokens, request, out=sys.stdout, progress=generation.show_progress
    )
    print(f"\n{generation.report(caches, said, options.method)}")


def _chat(options: argparse.Namespace) -> None:
    from veloxfn_mlx_adapter import chat

    config = _config(options)
    if not 0 < options.top_p <= 1:
        raise generation.UsageError(f"--top-p must be above 0 and at most 1, got {options.top_p}")
    manner = chat.Manner(
        system=options.system_prompt,
        top_p=options.top_p,
        **_sampling(options, config),
    )
    model, tokenizer = generation.load_model(options.model)
    config = generation.fitted(config, model, anneal_from=None, contiguous=options.contiguous)
    chat.chat(model, tokenizer, config, manner, out=sys.stdout)


def _serve(options: argparse.Namespace) -> None:
    from veloxfn_mlx_adapter import serving

    serving.serve(options, _config(options))


def _prompt(text: str | None, file: str | None) -> str:
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise generation.UsageError(f"--prompt-file {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise generation.UsageError(f"--prompt-file {file}: not UTF-8 text: {error.reason}") from error
    text = DEFAULT_PROMPT if text is None else text
    if not text.strip():
        raise generation.UsageError("the prompt is empty")
    return text


def _at_least(name: str, value: Number, low: int) -> Number:
    if not low <= value < float("inf"):
        raise generation.UsageError(f"{name} must be a finite number >= {low}, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
