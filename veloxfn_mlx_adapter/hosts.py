"""The libraries whose models take eviction caches: mlx_lm, and those of the same shape.

Each has `models.base` with the attention that its models call, and `models.cache`, where it looks up the classes of
saved caches by name. None is imported here: what is not loaded has no models to serve.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["ATTENTION", "HOSTS", "bases", "of_hosts", "register"]

HOSTS = ("mlx_lm", "mlx_vlm")
ATTENTION = "scaled_dot_product_attention"

_kinds: list[type] = []


def bases() -> Iterator[ModuleType]:
    """`models.base` of each host that is loaded."""
    for host in HOSTS:
        module = sys.modules.get(f"{host}.models.base")
        if module is not None and hasattr(module, ATTENTION):
            yield module


def of_hosts() -> list[ModuleType]:
    """All loaded modules of the hosts."""
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in HOSTS]


def register(kind: type) -> None:
    """Let `load_prompt_cache` of the hosts, now and when they are imported, find a class of caches by its name."""
    _kinds.append(kind)
    for host in HOSTS:
        module = sys.modules.get(f"{host}.models.cache")
        if module is not None:
            setattr(module, kind.__name__, kind)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Sees a host's `models.cache` being imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in [f"{host}.models.cache" for host in HOSTS]:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Loads a module, then puts the registered classes into it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for kind in _kinds:
            setattr(module, kind.__name__, kind)
