"""What `veloxfn serve` does: mlx_lm's own server, whose models make eviction caches.

The server is run as it is. For as long as it runs, the functions by which it loads a model are replaced by ones that
`attach` to what they load, and its store of prompt caches by one that heeds `--prompt-cache-bytes` in every mode.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
from huggingface_hub.errors import CacheNotFound
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load_adapters

from veloxfn import Retention
from veloxfn.cadence import most_tokens
from veloxfn_mlx_adapter import demo, generation
from veloxfn_mlx_adapter.cache import EvictingCache
from veloxfn_mlx_adapter.diagnostics import method_name

__all__ = ["flags", "prepared", "serve"]

# Flags of mlx_lm's server that cannot go with eviction.
_QUANTISED = ("kv_bits", "kv_group_size", "quantized_kv_start")


class _Flags(argparse.ArgumentParser):
    """Takes the flags that mlx_lm's server defines, and stops there."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if names[0].lstrip("-").replace("-", "_") in _QUANTISED:
            options["help"] = argparse.SUPPRESS
        return super().add_argument(*names, **options)

    def parse_args(self, *_: Any) -> NoReturn:  # type: ignore[override]
        raise _Defined(self)


class _Defined(Exception):  # noqa: N818  # no error: how a parser comes out of the server's main
    pass


def flags() -> argparse.ArgumentParser:
    """The flags of mlx_lm's server, --help among them, as a parser for `parents=`."""
    with _replaced(argparse=SimpleNamespace(ArgumentParser=_Flags)):
        try:
            server.main()
        except _Defined as defined:
            parser: argparse.ArgumentParser = defined.args[0]
            return parser
    raise RuntimeError("mlx_lm.server.main no longer parses its flags with argparse")


def serve(options: argparse.Namespace, config: Retention) -> None:
    """Serve until interrupted or terminated.

    Args:
        options: what the server's `flags` were given, and `contiguous`.
        config: what `generation.config_for` returned.

    Raises:
        UsageError: an option that cannot be followed; nothing was served.
    """
    with prepared(options, config) as provider, _terminated_as_interrupted():
        caches = [cache for cache in provider.model.make_cache() if isinstance(cache, EvictingCache)]
        if _listens():
            print(
                f"serving {options.model} at http://{options.host}:{options.port}/v1: {method_name(config)}, "
                f"budget {config.budget} rows per kv head in {len(caches)} layers",
                file=sys.stderr,
                flush=True,
            )
        parsed = SimpleNamespace(add_argument=lambda *_, **__: None, parse_args=lambda: options)
        with _replaced(
            argparse=SimpleNamespace(ArgumentParser=lambda *_, **__: parsed),
            ModelProvider=lambda _: provider,
            ResponseGenerator=_Generator,
        ):
            server.main()


@contextmanager
def prepared(options: argparse.Namespace, config: Retention) -> Iterator[Any]:
    """Give the server's `ModelProvider` with its default model, and let all models that it loads evict.

    Raises:
        UsageError: an option that cannot be followed, a model that does not load, or one that cannot evict so.
    """
    for name in _QUANTISED:
        if getattr(options, name, None) != flags().get_default(name):
            raise generation.UsageError(
                f"--{name.replace('_', '-')}: a quantised cache cannot evict; lower --budget to save memory"
            )
    if _listens():
        options.port = _free_port(options.host, options.port)
    options.prefill_step_size = min(options.prefill_step_size, most_tokens(config))
    if options.model is None or options.model == demo.DEMO_NAME:
        try:
            options.model = str(demo.gguf_path())
        except ModuleNotFoundError as error:
            raise generation.UsageError(str(error)) from error

    provider: Any = None

    def evicting(load: Callable[..., Any], *, drafts: bool) -> Callable[..., Any]:
        def loaded(path: str, *arguments: Any, **settings: Any) -> Any:
            found = load(path, *arguments, **settings)
            if not drafts or "tokenizer_config" in settings:  # a draft model goes back step by step: it cannot evict
                model = found[0]
                fitted = generation.fitted(config, model, anneal_from=None, contiguous=options.contiguous)
                generation.attached(model, fitted)
            return found

        return loaded

    with _replaced(
        load=evicting(_loading(server.load), drafts=True),
        sharded_load=evicting(server.sharded_load, drafts=False),
        scan_cache_dir=_scanning(server.scan_cache_dir),
        LRUPromptCache=_storing(options.prompt_cache_bytes, drafted=lambda: provider.draft_model is not None),
    ):
        try:
            provider = server.ModelProvider(options)
            provider.load_default()
        except generation.UsageError:
            raise
        except Exception as error:
            raise generation.not_loaded(options.model, error) from error
        yield provider


class _Generator(server.ResponseGenerator):  # type: ignore[misc]
    """The server's generating thread, which stops between tokens and leaves nothing behind in MLX.

    Else a process that ends soon after the thread can abort: MLX is still ending the thread's streams.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._answering: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        super().__init__(*arguments, **options)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        context, answer = super().generate(*arguments, **options)
        self._answering[id(context)] = context
        return context, answer

    def stop_and_join(self) -> None:
        self._stop = True  # no further request
        for context in list(self._answering.values()):
            context.stop()
        super().stop_and_join()

    def _generate(self) -> None:
        try:
            super()._generate()
        finally:
            mx.synchronize()
            if hasattr(mx, "clear_streams"):
                mx.clear_streams()


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Also loads the demo model, by its name or its file."""

    def loaded(path: str, *arguments: Any, **settings: Any) -> Any:
        if path != demo.DEMO_NAME and not path.endswith(".gguf"):
            return load(path, *arguments, **settings)
        model, tokenizer = demo.load_demo() if path == demo.DEMO_NAME else demo.load_gguf(path)
        if settings.get("adapter_path") is not None:
            model = load_adapters(model, settings["adapter_path"])
            model.eval()
        template = settings.get("tokenizer_config", {}).get("chat_template")
        if template:
            tokenizer.chat_template, tokenizer.has_chat_template = template, True
        return (model, tokenizer, {"model_type": "llama"}) if settings.get("return_config") else (model, tokenizer)

    return loaded


def _scanning(scan: Callable[[], Any]) -> Callable[[], Any]:
    """Finds no models where nothing was ever downloaded, in place of an error."""

    def scanned() -> Any:
        try:
            return scan()
        except CacheNotFound:
            return SimpleNamespace(repos=[])

    return scanned


def _storing(most_bytes: int | None, *, drafted: Callable[[], bool]) -> type:
    """The server's store of prompt caches, of at most so many bytes, that hands out none that cannot be used.

    Args:
        most_bytes: of all caches; None = any.
        drafted: whether a draft model helps, whose rejected tokens have to be taken back.
    """

    class PromptCaches(LRUPromptCache):  # type: ignore[misc]
        def __init__(self, max_size: int) -> None:
            super().__init__(max_size, **({} if most_bytes is None else {"max_bytes": most_bytes}))

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
            found, rest = super().fetch_nearest_cache(model, tokens)
            stuck = found is not None and drafted() and not all(cache.is_trimmable() for cache in found)
            return (None, tokens) if stuck or not rest else (found, rest)  # an answer needs a token to begin with

        def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any) -> None:
            size = sum(cache.nbytes for cache in prompt_cache)
            logging.info(f"Eviction caches: {len(tokens)} tokens seen, {size:,} bytes held")
            super().insert_cache(model, tokens, prompt_cache, **options)

    return PromptCaches


def _listens() -> bool:
    """Whether this process is the one of a distributed group that clients talk to."""
    rank: int = mx.distributed.init().rank()
    return rank == 0


def _free_port(host: str, port: int) -> int:
    """The port, one that is free in place of 0.

    Raises:
        UsageError: it cannot be listened on.
    """
    if not 0 <= port < 2**16:
        raise generation.UsageError(f"--port must be 0 to 65535, got {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            found: int = tried.getsockname()[1]
            return found
    except OSError as error:
        raise generation.UsageError(f"--host {host} --port {port}: {error.strerror or error}") from error


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Stop on SIGTERM as on an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _replaced(**others: Any) -> Iterator[None]:
    """Names of mlx_lm's server that mean something else for a while."""
    before = {name: getattr(server, name) for name in others}
    for name, other in others.items():
        setattr(server, name, other)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(server, name, own)
