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


def _compiles(arguments: tuple[object, ...]) -> bool:
    if on_gpu():  # where MLX's CUDA back end divides by the size of what it fuses
        return all(argument.size > 0 for argument in arguments if isinstance(argument, mx.array))
    return _has_compiler()


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """`mx.compile` of a function of arrays; the function itself on a CPU without `g++`, which MLX needs to build."""
    compiled: Callable[P, T] = mx.compile(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        return (compiled if _compiles(arguments) else function)(*arguments, **options)

    return call
