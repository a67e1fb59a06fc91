"""Fuse a function's elementwise chain into one kernel where MLX can build one."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import mlx.core as mx

__all__ = ["fused", "on_gpu"]

P = ParamSpec("P")
T = TypeVar("T")


def on_gpu() -> bool:
    """Whether arrays are computed on a GPU by default."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


@functools.cache
def _has_compiler() -> bool:
    return shutil.which("g++") is not None


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """`mx.compile` of a function of arrays; the function itself on a CPU without `g++`, which MLX needs to build."""
    compiled: Callable[P, T] = mx.compile(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        chosen = compiled if on_gpu() or _has_compiler() else function
        return chosen(*arguments, **options)

    return call
