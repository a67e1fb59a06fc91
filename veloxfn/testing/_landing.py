"""Methods that are about to land: the module, or a stand-in whose Config no config is an instance of."""

import importlib
from types import SimpleNamespace
from typing import Any

from veloxfn.base import Retention


def _landing(name: str) -> Any:
    try:
        return importlib.import_module(f"veloxfn.{name}")
    except ImportError:
        return SimpleNamespace(Config=type(f"{name}Config", (Retention,), {}))


cam, keyformer, pyramidkv, snapkv, tova = map(_landing, ("cam", "keyformer", "pyramidkv", "snapkv", "tova"))
