"""Run a Metal kernel on the CPU, lane by lane, behind `kernels/msl_host.h`. Needs g++ on Linux; slow, for tests.

A kernel runs once per *order*: 0 runs the lanes between two barriers forward, 1 in reverse, k >= 2 shuffled with seed
k, threadgroups likewise. Outputs that differ between orders by a single bit are an error, as are indices out of
bounds, barriers and simd operations that not all lanes reach, and more than 32 KB of threadgroup memory. Outputs are
filled with `POISON` before each run (NaN for floats), threadgroup memory with NaN whose bits differ between orders.

Not seen: an index beyond a threadgroup array through a pointer into it, or by the address of an element. Float atomics
give sums that depend on the order, and so are an error. `if constexpr` compiles both branches, unlike MLX's templates.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from veloxfn.ops.kept import kept_files
from veloxfn.ops.launch import Kernel, Output, Template, source_of

__all__ = ["ORDERS", "THREADGROUP_BYTES", "KernelError", "available", "run", "run_source"]

# Runs of a kernel: forward, reverse, one shuffle.
ORDERS = int(os.environ.get("VELOXFN_EMULATION_ORDERS", "3"))
THREADGROUP_BYTES = 32 * 1024
# Little-endian 0x7fc0: NaN in float32, float16 and bfloat16.
POISON = b"\xc0\x7f"

_FLAGS = [
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsingle-precision-constant",
    "-fno-threadsafe-statics",
    "-U_FORTIFY_SOURCE",
    "-fsanitize=bounds",
    "-Werror=frame-larger-than=32768",
    "-Werror=return-type",
    "-nodefaultlibs",
]
# Not a multiple of the page: the tops of all stacks would compete for one set of the cache.
_STACK_BYTES = 65 * 1024 + 64
_LANES = 1024

_NAMES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MLX_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

Bits = npt.NDArray[Any]


class KernelError(RuntimeError):
    """A kernel did what no GPU forgives: a race, an index out of bounds, divergence, too much threadgroup memory."""


class _Range(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("base", ctypes.c_void_p), ("count", ctypes.c_long))


def available() -> bool:
    """Whether this machine can run kernels so: Linux with g++."""
    return sys.platform == "linux" and shutil.which("g++") is not None


def run(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    outputs: Sequence[Output],
    *,
    template: Template,
    groups: tuple[int, int, int],
    threads: int,
    order: int | Sequence[int] | None = None,
) -> list[mx.array]:
    """Run a kernel of `kernels/metal` in several orders.

    Args:
        kernel: the kernel.
        inputs: one array per name.
        outputs: shape and dtype of each output.
        template: constants of the body, types among them.
        groups: threadgroups along x, y and z.
        threads: of a threadgroup, along x; a multiple of 32, at most 1024.
        order: the orders to run in, or one; None = 0 to `ORDERS` - 1 (environment: VELOXFN_EMULATION_ORDERS, 3).

    Returns:
        The outputs, on which all orders agree.

    Raises:
        KernelError: a race, an index out of bounds, divergence, too much threadgroup memory.
        RuntimeError: no g++, or a text that it does not take.
        ValueError: inputs that do not match the names, or a number of threads that is none.
    """
    header, body = source_of(kernel, "host")
    return run_source(
        header,
        body,
        kernel.inputs,
        kernel.outputs,
        inputs,
        outputs,
        template=template,
        groups=groups,
        threads=threads,
        order=order,
        name=kernel.name,
    )


def run_source(
    header: str,
    body: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    inputs: Sequence[mx.array],
    outputs: Sequence[Output],
    *,
    template: Template,
    groups: tuple[int, int, int],
    threads: int,
    order: int | Sequence[int] | None = None,
    name: str = "kernel",
) -> list[mx.array]:
    """`run`, of a header and a body given as text."""
    if len(inputs) != len(input_names) or len(outputs) != len(output_names):
        raise ValueError(
            f"{name}: {len(inputs)} inputs and {len(outputs)} outputs for the names {input_names} and {output_names}"
        )
    if threads % 32 or not 32 <= threads <= _LANES:
        raise ValueError(f"{name}: threads={threads} must be a multiple of 32 from 32 to {_LANES}")
    if min(groups) < 1:
        raise ValueError(f"{name}: groups={groups} must be positive")
    orders = range(ORDERS) if order is None else [order] if isinstance(order, int) else list(order)
    mx.eval(list(inputs))
    text = _text(header, body, name, list(zip(input_names, inputs, strict=True)), outputs, output_names, template)
    library = _loaded(text, name)
    used = library.veloxfn_threadgroup_bytes()
    if used > THREADGROUP_BYTES:
        raise KernelError(f"{name}: {used} bytes of threadgroup memory, more than the {THREADGROUP_BYTES} of a GPU")
    given = [_bits_of(array) for array in inputs]
    agreed: list[Bits] = []
    for chosen in orders:
        made = [_poisoned(shape, dtype) for shape, dtype in outputs]
        _run_once(library, name, given, made, [*input_names, *output_names], inputs, groups, threads, chosen)
        if agreed:
            _compare(name, output_names, agreed, made, orders[0], chosen)
        else:
            agreed = made
    return [_array_of(bits, dtype) for bits, (_, dtype) in zip(agreed, outputs, strict=True)]


def _text(
    header: str,
    body: str,
    name: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[Output],
    output_names: Sequence[str],
    template: Template,
) -> str:
    """The C++ file: as MLX generates it, with arrays that know their range."""
    words = set(re.findall(r"\w+", body))
    lines = []
    for key, value in template.items():
        if isinstance(value, bool):
            lines.append(f"constexpr bool {key} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"constexpr int {key} = {value};")
        else:
            lines.append(f"using {key} = {_NAMES[value]};")
    shapes = len(inputs) + len(outputs)
    for slot, (called, array) in enumerate(inputs):
        kind = f"const {_NAMES[array.dtype]}"
        if array.ndim == 0:
            lines.append(f"{kind}& {called} = *({kind}*)veloxfn_arrays[{slot}];")
        else:
            lines.append(_declared(called, kind, slot))
        if f"{called}_shape" in words and array.ndim:
            lines.append(_declared(f"{called}_shape", "const int", shapes + slot))
        if f"{called}_ndim" in words:
            lines.append(f"const int {called}_ndim = {array.ndim};")
    for slot, (called, (_, dtype)) in enumerate(zip(output_names, outputs, strict=True), len(inputs)):
        lines.append(_declared(called, _NAMES[dtype], slot))
    attributes = (
        "uint3 thread_position_in_threadgroup, uint3 threadgroup_position_in_grid, uint3 threads_per_threadgroup, "
        "uint3 threadgroups_per_grid, uint thread_index_in_simdgroup, uint simdgroup_index_in_threadgroup"
    )
    return (
        f'#line 1 "{name}: header"\n{header}\n#line 1 "{name}: arguments"\nstatic void veloxfn_body({attributes}) {{\n'
        + "\n".join(lines)
        + f'\n#line 1 "{name}.metal"\n{body}\n}}\n'
    )


def _declared(called: str, kind: str, slot: int) -> str:
    return f"const host::checked<{kind}> {called}(({kind}*)veloxfn_arrays[{slot}], veloxfn_ranges + {slot});"


def _run_once(
    library: ctypes.CDLL,
    name: str,
    given: Sequence[Bits],
    made: Sequence[Bits],
    names: Sequence[str],
    inputs: Sequence[mx.array],
    groups: tuple[int, int, int],
    threads: int,
    order: int,
) -> None:
    shapes = [np.array(array.shape, dtype=np.int32) for array in inputs]
    arrays: list[Bits] = [*given, *made, *shapes]
    labels = [*names, *(f"{label}_shape" for label in names[: len(inputs)])]
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    ranges = (_Range * len(arrays))(
        *(_Range(label.encode(), array.ctypes.data, array.size) for label, array in zip(labels, arrays, strict=True))
    )
    total = groups[0] * groups[1] * groups[2]
    visits = np.arange(total, dtype=np.uint32)
    if order == 1:
        visits = visits[::-1].copy()
    elif order > 1:
        visits = np.random.default_rng(order).permutation(visits)
    message = ctypes.create_string_buffer(1000)
    with _LOCK:
        failed = library.veloxfn_run(
            pointers,
            ranges,
            (ctypes.c_uint * 3)(*groups),
            ctypes.c_void_p(visits.ctypes.data),
            ctypes.c_uint(threads),
            ctypes.c_int(order),
            ctypes.c_void_p(_stacks()),
            ctypes.c_size_t(_STACK_BYTES),
            message,
            ctypes.c_size_t(len(message)),
        )
    if failed:
        raise KernelError(f"{name}, order {order}: {message.value.decode(errors='replace')}")


def _compare(
    name: str, labels: Sequence[str], agreed: Sequence[Bits], made: Sequence[Bits], first: int, second: int
) -> None:
    for label, a, b in zip(labels, agreed, made, strict=True):
        differing = np.argwhere(a != b)
        if len(differing):
            at = tuple(int(i) for i in differing[0])
            raise KernelError(
                f"{name}: a race: {len(differing)} elements of {label} differ between orders {first} and {second}, the "
                f"first at {list(at)}: bits {int(a[at]):#x} and {int(b[at]):#x}"
            )


def _bits_of(array: mx.array) -> Bits:
    """The elements of an array in row-major order, as unsigned integers."""
    if array.dtype == mx.bool_:
        return np.ascontiguousarray(np.array(array)).view(np.uint8)
    if array.ndim == 0:
        return _bits_of(array[None])
    return np.ascontiguousarray(np.array(mx.view(array, _MLX_BITS[array.dtype.size])))


def _poisoned(shape: tuple[int, ...], dtype: mx.Dtype) -> Bits:
    size = dtype.size
    pattern = (POISON * 4)[:size] if size > 1 else POISON[1:]
    return np.full(shape, int.from_bytes(pattern, "little"), dtype=_BITS[size])


def _array_of(bits: Bits, dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(bits != 0)
    array = mx.array(bits)
    return mx.view(array[None], dtype)[0] if array.ndim == 0 else mx.view(array, dtype)


# ---- building ----

_LOCK = threading.Lock()


@cache
def _stack_memory() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, _LANES * _STACK_BYTES)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _stacks() -> int:
    return _stack_memory()[1]


@cache
def _loaded(text: str, name: str) -> ctypes.CDLL:
    key = hashlib.sha256("\0".join([text, os.uname().machine, *_FLAGS]).encode()).hexdigest()[:24]
    folder = kept_files()
    if folder is None:
        raise RuntimeError("no folder to build kernels in: set XDG_CACHE_HOME")
    built = folder / f"{key}.so"
    if not built.exists():
        _build(text, built, name)
    library = ctypes.CDLL(str(built))
    library.veloxfn_threadgroup_bytes.restype = ctypes.c_long
    return library


def _build(text: str, built: Path, name: str) -> None:
    if not available():
        raise RuntimeError('backend="host" needs g++ on Linux, which this machine has not')
    with tempfile.TemporaryDirectory(dir=built.parent) as place:
        made = Path(place) / "kernel.so"
        # The libraries come after the text; libubsan is not among them: the header has its handlers.
        command = ["g++", *_FLAGS, "-x", "c++", "-", "-o", str(made), "-lm", "-lc", "-lgcc"]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: g++ does not take the kernel:\n{done.stderr[:4000]}")
        made.replace(built)
