"""Count what a function's graph would launch on a GPU, on any machine.

    launches(policy.update_batched, state, keys, values, backend="metal").kernels
    ('CustomKernel', 'CompiledBroadcastAdd')

A primitive that only looks at its input in another way (a reshape, a slice, a broadcast) launches nothing; every other
one counts once, a concatenation once per input, a compiled chain once. MLX builds custom kernels without a GPU inside
an export trace, so their graphs can be counted there too.

Not seen: launches inside one primitive (a sort may take several), and MLX's own fused operations, which it builds in
their unfused form where there is no GPU. A step is counted as it runs if it is given as it runs, compiled or not.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx

from veloxfn.ops import fusion, launch

__all__ = ["Launches", "forced", "launches"]

# Primitives whose result is another look at their input's buffer; those of the second set leave it in no dense order.
_DENSE = {"Copy", "Depends", "ExpandDims", "Squeeze", "StopGradient", "Unflatten"}
_STRIDED = {"AsStrided", "Broadcast", "BroadcastAxes", "Slice", "Split", "Transpose"}
# These copy an input that is in no dense order, and launch nothing else ...
_DENSIFY = {"Contiguous", "Flatten", "Reshape", "View"}
# ... and these launch a kernel, but copy the array that they write into first, unless nobody else holds it.
_UPDATES = {"DynamicSliceUpdate", "Scatter", "ScatterAxis", "SliceUpdate"}


class Launches(NamedTuple):
    """What a graph launches.

    `kernels` are the primitives that launch, in the order of the graph. `copies` are copies that may come on top:
    "Transpose -> Reshape" of an input that may not be dense, "-> ScatterAxis" of an array that is written into.
    """

    kernels: tuple[str, ...]
    copies: tuple[str, ...]


def launches(function: Callable[..., Any], *arguments: Any, backend: str | None = None) -> Launches:
    """Launches of one call.

    Args:
        function: of arrays and trees of them, to an array or a tree. Results without elements are left out.
        arguments: of the call; they are evaluated first.
        backend: None = the machine's own; else the ops of veloxfn are made to choose this one, and to build their graph
            as on a GPU unless it is "reference". A compiled function must not have been traced with another one.

    >>> import mlx.core as mx
    >>> x = mx.ones((4, 8))
    >>> launches(lambda x: mx.exp(x.T).reshape(-1) @ mx.ones(32), x)
    Launches(kernels=('Exp', 'Full', 'Matmul'), copies=())
    """
    mx.eval(arguments)
    if backend is None:
        return _read(_dot(function(*arguments)))
    seen: list[str] = []

    def traced(unused: mx.array) -> mx.array:
        seen.append(_dot(function(*arguments)))
        return unused + 1

    with forced(backend):
        mx.export_function(lambda _: None, traced, mx.zeros(1))
    return _read(seen[0])


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Make every op that is not told otherwise choose `backend`; "metal" inside a trace wherever it is.

    A function that was compiled before keeps the choice of its trace.

    Raises:
        ValueError: an unknown back end.
    """
    if backend not in launch.BACKENDS:
        raise ValueError(f"backend must be one of {launch.BACKENDS}, got {backend!r}")
    choose, on_gpu = launch.backend_for, fusion.on_gpu

    def chosen(asked: str | None) -> str:
        return backend if asked is None else choose(asked)

    def gpu() -> bool:
        return True

    with _replaced(choose, chosen), nullcontext() if backend in ("reference", "host") else _replaced(on_gpu, gpu):
        yield


@contextmanager
def _replaced(old: Callable[..., Any], new: Callable[..., Any]) -> Iterator[None]:
    """`new` in place of `old` under every name that a module of veloxfn gave it."""
    holders = [
        (vars(module), name)
        for path, module in list(sys.modules.items())
        if path.split(".")[0] == "veloxfn" and path != __name__
        for name, value in vars(module).items()
        if value is old
    ]
    for names, name in holders:
        names[name] = new
    try:
        yield
    finally:
        for names, name in holders:
            names[name] = old


def _dot(tree: Any) -> str:
    """The graph of a tree's arrays that hold something."""
    text = io.StringIO()
    mx.export_to_dot(text, *(leaf for leaf in _leaves(tree) if leaf.size))
    return text.getvalue()


def _leaves(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _leaves(part)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _leaves(part)


def _read(graph: str) -> Launches:
    """Launches of a graph in the dot language, as MLX writes it: inputs before what they go into."""
    names: dict[str, str] = {}  # of primitives
    inputs: dict[str, list[str]] = {}  # arrays that go into a primitive
    strided: dict[str, str] = {}  # array that may lie in no dense order -> the primitive that made it so
    for line in graph.splitlines():
        if made := re.match(r'\{ (\d+) \[label ="([^" ]+)[^"]*"', line):  # "View uint32" is a View
            names[made[1]], inputs[made[1]] = made[2], []
        elif into := re.match(r'"(\w+)" -> (\d+)', line):
            inputs[into[2]].append(into[1])
        elif (out := re.match(r'(\d+) -> "(\w+)"', line)) and (
            reason := _strides(names[out[1]], inputs[out[1]], strided)
        ):
            strided[out[2]] = reason
    kernels, copies = [], []
    for number, name in names.items():
        if name in _DENSIFY or name == "CustomKernel":
            copies += [f"{strided[array]} -> {name}" for array in inputs[number] if array in strided]
        if name in _UPDATES:
            copies.append(f"-> {name}")
        if name not in _DENSE | _STRIDED | _DENSIFY:
            kernels += [name] * (len(inputs[number]) if name == "Concatenate" else 1)
    return Launches(tuple(kernels), tuple(copies))


def _strides(name: str, inputs: list[str], strided: dict[str, str]) -> str | None:
    """The primitive that put the result of `name` in no dense order, if one did."""
    if name in _STRIDED:
        return name
    return strided.get(inputs[0]) if name in _DENSE and inputs else None
