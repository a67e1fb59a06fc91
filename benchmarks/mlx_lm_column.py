"""One of mlx_lm's test files, run with one kind of cache; mlx_lm_suite.py starts this once per file and column.

The tests ask for a model by its name on a hub: they get the demo model instead, and no hub is asked. Where they let
mlx_lm make caches, and where they make a `KVCache` themselves, they get eviction caches, if the column has any.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import threading
import traceback
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models import cache as mlx_lm_cache
from typing_extensions import override

import veloxfn
from veloxfn import Policy
from veloxfn_mlx_adapter import EvictingCache, attach, load_demo

__all__ = ["SETTINGS", "stand_in", "watch"]

SETTINGS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sink": 2},
    "h2o": {"sink": 1, "recent": 2, "age_normalised": True},
}


def policy_of(column: str) -> Policy[Any] | None:
    """The policy of a column "method budget"; None for "stock"."""
    if column == "stock":
        return None
    method, budget = column.split()
    return veloxfn.policy(veloxfn.METHODS[method].Config(budget=int(budget), **SETTINGS[method]))


def stand_in(policy: Policy[Any]) -> type:
    """What tests find under the name `KVCache`: makes eviction caches, which are its instances."""

    class Kind(type):
        def __call__(cls) -> Any:
            made: Any = EvictingCache(policy)
            made.unattended = True  # a copy has this, too
            return made

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, EvictingCache)

    return Kind("KVCache", (), {"merge": EvictingCache.merge})


def watch(notes: Counter[str]) -> None:
    """Count what the caches of a test are asked for and refuse, in `notes`."""

    def counted(kind: type, name: str, note: str) -> None:
        original = getattr(kind, name)

        def counting(self: Any, *arguments: Any, **options: Any) -> Any:
            notes[note] += 1
            result = original(self, *arguments, **options)
            if kind is EvictingCache and self.size() > self.config.budget:
                notes["evicted"] += 1
            return result

        setattr(kind, name, counting)

    def refusing(name: str, note: str, *errors: type[Exception]) -> None:
        original = getattr(EvictingCache, name)

        def refused(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                result = original(self, *arguments, **options)
            except errors:
                notes[note] += 1
                raise
            # A server asks in a thread of its own, and goes without.
            if result is False and threading.current_thread() is threading.main_thread():
                notes[note] += 1
            return result

        setattr(EvictingCache, name, refused)

    counted(mlx_lm_cache.KVCache, "update_and_fetch", "stock")
    counted(mlx_lm_cache.BatchKVCache, "update_and_fetch", "stock")
    counted(EvictingCache, "update_and_fetch", "ours")
    refusing("trim", "trim", ValueError)
    refusing("is_trimmable", "trim")
    refusing("to_quantized", "quantised", NotImplementedError)
    refusing("make_mask", "window", ValueError)


def take_anything() -> None:
    """Let tests feed made-up keys: whole numbers become floats, and where no model attends, keys pass for queries."""
    original = EvictingCache.update_and_fetch

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if mx.issubdtype(keys.dtype, mx.integer):
            keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        fetched = original(self, keys, values)
        if getattr(self, "unattended", False):
            self.observe(keys, fetched[0], 1.0, "causal" if keys.shape[2] > 1 else None)
        return fetched

    EvictingCache.update_and_fetch = update_and_fetch  # type: ignore[method-assign]


class Result(unittest.TestResult):
    """Makes the model ready before each test, and writes down how each ended."""

    def __init__(self, model: Any, policy: Policy[Any] | None, out: Path) -> None:
        super().__init__()
        self.notes: Counter[str] = Counter()
        self._model, self._policy, self._out = model, policy, out
        self._told: dict[str, dict[str, Any]] = {}

    def ready(self) -> None:
        """Caches as the column has them, whatever the test before left; the same random numbers for every column."""
        if "make_cache" in vars(self._model):
            del self._model.make_cache
        if self._policy is not None:
            attach(self._model, self._policy)
        mx.random.seed(0)
        self.notes.clear()

    @override
    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.ready()
        self._tell(test, "unfinished")

    @override
    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._told[test.id()] |= dict(self.notes)
        self._write()

    @override
    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell(test, "passed")

    @override
    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._tell(test, "skipped", reason)

    @override
    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)

    @override
    def addError(self, test: unittest.TestCase, err: Any) -> None:
        kind, error, trace = err
        frames = [frame for frame in traceback.extract_tb(trace) if "/unittest/" not in frame.filename]
        own = [frame for frame in frames if Path(frame.filename).name.startswith("test_")]
        text = (str(error) or kind.__name__).strip().splitlines()[0][:300]
        inside = {Path(frame.filename).name + ":" + frame.name for frame in frames}
        line = f"{own[-1].line}" if own else ""
        self._tell(test, "failed", f"{kind.__name__}: {text}", line=line, inside=sorted(inside))

    def _tell(self, test: unittest.TestCase, outcome: str, error: str = "", **more: Any) -> None:
        self._told[test.id()] = {"outcome": outcome, "error": error, **more}
        self._write()

    def _write(self) -> None:
        self._out.write_text(json.dumps(self._told), encoding="utf-8")


def tests_of(path: Path) -> ModuleType:
    """A test file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("column", help='"stock" or "method budget"')
    parser.add_argument("out", type=Path, help="a JSON file: how each test ended")
    parser.add_argument("--chunk", type=int, help="cut prompts outside of batches at multiples of this")
    parser.add_argument("--unbounded", action="store_true", help="make the KVCache where a test makes a rotating one")
    parser.add_argument("--only", nargs="*", help="ids of tests to run")
    options = parser.parse_args()
    if options.chunk:
        # mlx_lm.generate the attribute is a function of that name.
        importlib.import_module("mlx_lm.generate").generate_step.__kwdefaults__["prefill_step_size"] = options.chunk
    model, tokenizer = load_demo()
    policy = policy_of(options.column)
    result = Result(model, policy, options.out)
    take_anything()
    watch(result.notes)
    mlx_lm.utils.load = lambda *_, **__: (model, tokenizer)
    module = tests_of(options.file)
    if policy is not None and hasattr(module, "KVCache"):
        module.KVCache = stand_in(policy)  # type: ignore[attr-defined]
    if options.unbounded:
        module.RotatingKVCache = lambda *_, **__: module.KVCache()  # type: ignore[attr-defined]
    result.ready()
    chosen = unittest.TestSuite()
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        chosen.addTests(test for test in suite if not options.only or test.id() in options.only)  # type: ignore[union-attr]
    chosen.run(result)


if __name__ == "__main__":
    main()
