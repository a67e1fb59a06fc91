"""Tiny models of mlx_lm's own tests: `tests/test_models.py` of its source distribution, fetched by pip, never kept.

Its tests hand every model that they build to `model_test_runner`; here that method collects them. Many would be huge
once evaluated, which its tests never do: those are built again narrower, with few layers and a small vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

LARGE = 16e6  # bytes of weights above which a model is built again
TOO_LARGE = 300e6  # above which it is left out where that fails
VOCABULARY = 500
LAYERS = 4  # of those that have more than 12


class UnavailableError(Exception):
    """Why mlx_lm's tests cannot be had."""


@dataclasses.dataclass
class Family:
    """A configuration of mlx_lm's tests."""

    name: str  # of its module in mlx_lm.models, with a number from its second configuration on
    built: Any  # as its test made it, not evaluated

    @functools.cached_property
    def model(self) -> Any:
        """In float32, evaluated, and no parameter all zeros.

        Raises:
            ValueError: it is too large and no smaller one runs, or running it would corrupt memory.
        """
        model = self.built
        if "out[self._dummy_tokenizer_ids]" in inspect.getsource(type(model)):  # phi3small up to mlx_lm 0.31
            raise ValueError("it writes beyond its logits: token ids index the sequences of the batch")
        if weight(model) > LARGE:
            model = _cut_down(model)
        if weight(model) > TOO_LARGE:
            raise ValueError(f"{weight(model) / 1e9:.1f} GB of weights, and no smaller model of it runs")
        _settle(model)
        return model


@functools.cache
def collected() -> tuple[dict[str, Family], dict[str, str]]:
    """Families by name, and of tests that made no model, the reason.

    Raises:
        UnavailableError: mlx_lm's tests cannot be had.
    """
    tests = _tests()
    found: dict[str, Family] = {}
    failed: dict[str, str] = {}

    def collect(case: Any, model: Any, *_: Any) -> None:
        module = name = type(model).__module__.removeprefix("mlx_lm.models.")
        count = 1
        while name in found:
            count += 1
            name = f"{module}-{count}"
        found[name] = Family(name, model)

    @contextmanager
    def part(case: Any, message: Any = None, **parameters: Any) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            failed[str(parameters.get("model_type", message))] = _told(error)

    tests.model_test_runner, tests.subTest = collect, part
    with _importable("hf_olmo"):
        for name, method in inspect.getmembers(tests, inspect.isfunction):
            test = inspect.unwrap(method)  # without a skip
            if not name.startswith("test_") or "model_test_runner" not in test.__code__.co_names:
                continue
            mx.random.seed(0)
            before = len(found)
            try:
                test(tests(name))
            except (Exception, SystemExit) as error:
                if len(found) == before:
                    failed[name] = _told(error)
    return found, failed


def weight(model: Any) -> int:
    """Bytes of the parameters."""
    return sum(leaf.nbytes for _, leaf in tree_flatten(model.parameters()))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def _importable(name: str) -> Iterator[None]:
    """An empty module: mlx_lm.models.olmo ends the process where it cannot import this one, which it never uses."""
    missing = name not in sys.modules
    if missing:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        if missing:
            del sys.modules[name]


def _settle(model: Any) -> None:
    """Floating parameters in float32; those of zeros, which would hide what a cache holds, at random."""
    leaves = tree_flatten(model.parameters())
    zeros = mx.stack([~mx.any(leaf) for _, leaf in leaves]).tolist()
    keys = mx.random.split(mx.random.key(0), len(leaves))
    settled = []
    for (name, leaf), zero, key in zip(leaves, zeros, keys, strict=True):
        floating = mx.issubdtype(leaf.dtype, mx.floating)
        if zero and floating:
            leaf = 0.1 * mx.random.normal(leaf.shape, key=key)
        elif zero:
            leaf = mx.random.randint(0, 100, leaf.shape, key=key).astype(leaf.dtype)
        settled.append((name, leaf.astype(mx.float32) if floating else leaf))
    model.update(tree_unflatten(settled))
    mx.eval(model.parameters())


# A smaller model of the same kind.


def _cut_down(model: Any) -> Any:
    """The first smaller one that runs, else `model`."""
    arguments = getattr(model, "args", None) or getattr(model, "config", None)
    for narrow in (8, 16, 32, 4, 2):
        for heads in (1, 4, 8, 16):
            with suppress(Exception):
                mx.random.seed(0)
                smaller = type(model)(_smaller(arguments, narrow, heads))
                if weight(smaller) <= LARGE and not _names_tokens(smaller):
                    mx.eval(smaller(mx.array([[0, 1, 2]])))
                    return smaller
    return model


def _names_tokens(model: Any) -> bool:
    """Whether a module holds integers beyond the small vocabulary: as indices of logits they would corrupt memory."""
    held = [value for module in model.modules() for value in module.values() if isinstance(value, mx.array)]
    return any(
        value.size and mx.issubdtype(value.dtype, mx.integer) and mx.max(value).item() >= VOCABULARY for value in held
    )


def _smaller(value: Any, narrow: int, heads: int, name: str = "", layers: Any = None) -> Any:
    """Arguments with widths divided by `narrow`, numbers of heads by `heads`, few layers and few words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return type(value)(**_smaller(fields, narrow, heads))
    if isinstance(value, dict):
        layers = next((entry for key, entry in value.items() if _counts_layers(key)), None)
        return {key: _smaller(entry, narrow, heads, str(key), layers) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        kept = value[:LAYERS] if layers is not None and len(value) == layers > 12 else value
        return type(value)(_smaller(entry, narrow, heads, name, layers) for entry in kept)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith("vocab_size") or name in ("num_vocab", "embedding_size"):
        return min(value, VOCABULARY)
    if "expand" in name:
        return min(value, 2)
    if _counts_layers(name):
        return LAYERS if value > 12 else value
    if "head" in name and "dim" not in name and (value % heads == 0 or heads % value == 0):
        return max(1, value // heads)
    if any(part in name for part in ("position", "theta", "ctx", "base", "length", "window", "max", "head")):
        return value
    return value // narrow if value >= 512 and value % narrow == 0 else value


def _counts_layers(name: str) -> bool:
    return name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")


# The source distribution.


def _tests() -> Any:
    """The class of tests of the installed mlx_lm's own version."""
    version = importlib.metadata.version("mlx-lm")
    member = f"mlx_lm-{version}/tests/test_models.py"
    with tarfile.open(_source(version)) as archive:
        try:
            text = archive.extractfile(member)
        except KeyError:
            text = None
        if text is None:
            raise UnavailableError(f"the source distribution of mlx-lm {version} has no tests/test_models.py")
        module = ModuleType("mlx_lm_test_models")
        exec(compile(text.read(), member, "exec"), module.__dict__)
    return module.TestModels


def _source(version: str) -> Path:
    """The source distribution in this user's cache, downloaded once."""
    name = f"mlx_lm-{version}.tar.gz"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "veloxfn"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="veloxfn-"))
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            os.replace(_downloaded(version, Path(fresh)), folder / name)
    return folder / name


def _downloaded(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-binary", "mlx-lm", "--dest", str(folder), f"mlx-lm=={version}"]
    wanted = f"the source distribution of mlx-lm {version}, which carries mlx_lm's tests"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip could not download {wanted}, in 180 s") from None
    path = folder / f"mlx_lm-{version}.tar.gz"
    if done.returncode or not path.exists():
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"pip could not download {wanted}: {' '.join(said[-1:]) or 'no network?'}")
    return path
