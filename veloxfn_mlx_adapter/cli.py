"""The `veloxfn` command."""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

import mlx.core as mx

import veloxfn
from veloxfn.cadence import most_tokens
from veloxfn_mlx_adapter import generation
from veloxfn_mlx_adapter.demo import DEMO_NAME
from veloxfn_mlx_adapter.method_options import add_method_options, settings_of
from veloxfn_mlx_adapter.prompts import DEFAULT_PROMPT

__all__ = ["main"]

DEFAULT_BUDGET = 256

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
    parser, generate = _parsers()
    options = parser.parse_args(arguments)
    if arguments is None:
        _prefer_openblas()
    try:
        _generate(options)
    except generation.UsageError as error:
        generate.error(str(error))
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


def _parsers() -> tuple[_Parser, _Parser]:
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
    generate.add_argument("--model", metavar="PATH", help=f"mlx_lm folder or hub id; default: {DEMO_NAME}")
    generate.add_argument(
        "--method", choices=list(veloxfn.METHODS), default="h2o", help="what decides which rows stay (h2o)"
    )
    generate.add_argument(
        "--budget", type=int, default=DEFAULT_BUDGET, help=f"rows kept per kv head and layer ({DEFAULT_BUDGET})"
    )
    generate.add_argument(
        "--scorer",
        choices=[name for name in veloxfn.METHODS if name != "pyramidkv"],
        help="pyramidkv: the method that ranks inside a layer (snapkv)",
    )
    generate.add_argument(
        "--contiguous",
        action="store_true",
        help="see kept rows without gaps, so that generation can run past the model's trained length",
    )
    generate.add_argument("--max-tokens", type=int, default=100, help="longest answer (100)")
    generate.add_argument("--chunk", type=int, default=512, help="prompt tokens read per call (512)")
    generate.add_argument("--temp", type=float, default=0.0, help="sampling temperature (0 = most likely token)")
    generate.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    add_method_options(generate)
    return parser, generate


def _generate(options: argparse.Namespace) -> None:
    settings = {"budget": options.budget} | settings_of(options)
    scorer = options.scorer
    if options.method == "pyramidkv" and "taper" in settings:
        scorer = scorer or "h2o"
    if "h2o" in (options.method, scorer) and settings.get("decay", 1.0) == 1.0:
        # better than the paper's plain sums where a prompt arrives in chunks
        settings = {"age_normalised": True} | settings
    config = generation.config_for(options.method, settings, scorer=scorer)
    request = generation.Request(
        prompt=_prompt(options.prompt, options.prompt_file),
        max_tokens=_at_least("--max-tokens", options.max_tokens, 1),
        chunk=min(_at_least("--chunk", options.chunk, 1), most_tokens(config)),
        seed=_at_least("--seed", options.seed, 0) % 2**64,
        temp=_at_least("--temp", options.temp, 0),
    )
    model, tokenizer = generation.load_model(options.model)
    tokens = generation.tokens_of(tokenizer, request.prompt)
    prompt_end = None if "anneal_from" in settings else len(tokens)
    config = generation.fitted(config, model, anneal_from=prompt_end, contiguous=options.contiguous)
    caches = generation.caches_for(model, config)
    said = generation.answer(
        model, tokenizer, caches, tokens, request, out=sys.stdout, progress=generation.show_progress
    )
    print(f"\n{generation.report(caches, said, options.method)}")


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
