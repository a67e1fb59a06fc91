"""Run a kernel of `kernels/metal` on the back end that an op chose.

The Metal text is the single source. `mx.fast.metal_kernel` takes it as it is, `mx.fast.cuda_kernel` behind
`msl_cuda.h`, which maps Metal's vocabulary to CUDA's, and `veloxfn.testing.emulation` behind `msl_host.h`, which lets
g++ compile it and runs it lane by lane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from veloxfn import checks
from veloxfn.ops.fusion import on_gpu
from veloxfn.ops.kept import kept

__all__ = [
    "BACKENDS",
    "MOST_SPREAD",
    "Body",
    "Kernel",
    "backend_for",
    "lanes_for",
    "launch",
    "source_of",
    "spread_over",
    "using",
]

BACKENDS = ("reference", "metal", "cuda", "host")

# For tests: what outputs are filled with before a kernel runs (None = nothing), and the back end that an op takes
# where none was asked for (None = that of the default device).
POISON: float | None = None
FORCED: str | None = None

_USING: ContextVar[str | None] = ContextVar("veloxfn_backend", default=None)


class Body(NamedTuple):
    """A body `kernels/metal/<name>.metal` of a kernel."""

    name: str
    aliases: tuple[tuple[str, str], ...] = ()  # names that it has for another array: (name, array)
    behind: bool = False  # once all lanes are through the ones before, of which it reads what they wrote


class Kernel(NamedTuple):
    """A kernel: its bodies, one after the other, and the names of its arrays."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bodies: tuple[Body, ...] = ()  # none = one of the kernel's name
    absent: tuple[str, ...] = ()  # inputs that are not given
    unmade: tuple[str, ...] = ()  # outputs that are not made
    most: int | None = 256  # threads of a threadgroup, at most; None = the template says how many
    alone: bool = False  # CUDA's compiler saves no registers for a second threadgroup beside one


Output = tuple[tuple[int, ...], mx.Dtype]
Template = Mapping[str, int | bool | mx.Dtype]


def backend_for(asked: str | None) -> str:
    """The back end of an op: what was asked for, else that of the default device.

    Args:
        asked: "reference" (MLX's own primitives), "metal", "cuda", "host" (the kernel, emulated on the CPU; slow, for
            tests), or None.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a back end that this machine has not.
    """
    if asked is None:
        if (chosen := _USING.get()) is not None:
            return chosen
        if FORCED is not None:
            return FORCED
        if not on_gpu():
            return "reference"
        return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "reference"
    checks.choice("backend", asked, BACKENDS)
    available = {"metal": mx.metal.is_available, "cuda": mx.cuda.is_available}
    if asked in available and not available[asked]():
        raise RuntimeError(f"backend={asked!r} needs MLX with {asked}, which this machine has not")
    return asked


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Ops take this back end inside, unless another is asked for: "reference" under `mx.vmap`, which kernels lack.

    It holds in this thread (and context). What was compiled before keeps the back end of its trace.

    Args:
        backend: see `backend_for`, which may raise.
    """
    token = _USING.set(backend_for(backend))
    try:
        yield
    finally:
        _USING.reset(token)


def launch(
    kernel: Kernel,
    backend: str,
    inputs: Sequence[mx.array | None],
    outputs: Sequence[Output | None],
    *,
    template: Template,
    groups: tuple[int, int, int],
    threads: int,
) -> list[mx.array]:
    """Run a kernel.

    Args:
        kernel: the kernel.
        backend: "metal", "cuda" or "host".
        inputs: one array per name, none empty; None where the body does not read it, by its template.
        outputs: shape and dtype of each output; None where the body does not write it, by its template.
        template: constants of the body, types among them.
        groups: threadgroups along x, y and z.
        threads: of a threadgroup, along x; a multiple of 32, at most the kernel's own.

    Returns:
        The outputs that are made.

    Raises:
        ValueError: more threads than the kernel may have.
    """
    if threads > (kernel.most or 1024):
        raise ValueError(f"{kernel.name} is built for {kernel.most or 1024} threads at most, got {threads}")
    kernel = variant(kernel, inputs, outputs)
    given = [array for array in inputs if array is not None]
    made = [output for output in outputs if output is not None]
    if backend == "host":
        from veloxfn.testing import emulation  # needs numpy and g++

        emulated: list[mx.array] = emulation.run(kernel, given, made, template=template, groups=groups, threads=threads)
        return emulated
    call = _call(kernel, backend, tuple(made), tuple(template.items()), groups, threads, POISON)
    return list(call(*given))


def variant(kernel: Kernel, inputs: Sequence[object | None], outputs: Sequence[object | None]) -> Kernel:
    """The kernel without the inputs and outputs that are None: every array costs a launch some time."""
    if None not in outputs and all(array is not None for array in inputs):
        return kernel
    return _variant(
        kernel,
        tuple(name for name, array in zip(kernel.inputs, inputs, strict=True) if array is None),
        tuple(name for name, output in zip(kernel.outputs, outputs, strict=True) if output is None),
    )


@lru_cache(maxsize=256)
def _variant(kernel: Kernel, absent: tuple[str, ...], unmade: tuple[str, ...]) -> Kernel:
    return kernel._replace(
        inputs=tuple(name for name in kernel.inputs if name not in absent),
        outputs=tuple(name for name in kernel.outputs if name not in unmade),
        bodies=kernel.bodies or (Body(kernel.name),),
        absent=(*kernel.absent, *absent),
        unmade=(*kernel.unmade, *unmade),
    )


def lanes_for(length: int) -> int:
    """Threads of a threadgroup that goes through `length` elements: whole SIMD groups, at most 1024."""
    return min(1024, -(-max(length, 1) // 32) * 32)


MOST_SPREAD = 544  # threads, that `spread_over` gives at most; `joined` of evict_step.metal has room for as many


def spread_over(length: int) -> tuple[int, int]:
    """Threads of a threadgroup, at most 544, and the elements, at most 8, whose loads each has under way at once.

    Few are idle where length is a power of two and one more, as for a full cache.
    """
    length = max(length, 1)
    each = -(-length // -(-length // (8 * MOST_SPREAD)))  # of one round
    slots = 1
    while slots * MOST_SPREAD < each:
        slots *= 2
    return lanes_for(-(-each // slots)), slots


@lru_cache(maxsize=1024)
def _call(
    kernel: Kernel,
    backend: str,
    outputs: tuple[Output, ...],
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
    groups: tuple[int, int, int],
    threads: int,
    poison: float | None,
) -> Callable[..., Sequence[mx.array]]:
    """A kernel with everything fixed but its inputs. Compiled: MLX writes out the source anew in every plain call."""
    made = _made(kernel, backend, threads if kernel.most is None else kernel.most)

    def call(*inputs: mx.array) -> Any:
        return made(
            inputs=list(inputs),
            template=list(template),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            init_value=poison,
        )

    compiled: Callable[..., Sequence[mx.array]] = mx.compile(call)
    return compiled


@cache
def _made(kernel: Kernel, backend: str, most: int) -> Callable[..., Any]:
    header, body = source_of(kernel, backend)
    end = bounds(most, alone=kernel.alone) if backend == "cuda" else ""
    # MLX keeps what it built under the kernel's name: another text needs another name.
    digest = hashlib.sha256((header + end + body).encode()).hexdigest()[:12]
    if backend == "cuda":
        header, body = included(kernel)
    make: Callable[..., Any] = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    made: Callable[..., Any] = make(
        name=f"veloxfn_{kernel.name}_{digest}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        header=header + end,
        source=body,
    )
    return made


def bounds(most: int, *, alone: bool) -> str:
    """The end of a header that tells CUDA's compiler how many threads a block may have, where MLX's own words do not.

    A block does not start whose threads have more registers than there are. 256 threads may have all that there can be.
    """
    if most <= 256:
        return ""
    least = ", 1" if alone else ""
    return f"#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({most}{least})\n"


@cache
def source_of(kernel: Kernel, backend: str) -> tuple[str, str]:
    """Header and body of a kernel for a back end: "metal", "cuda" or "host"."""
    folder = _folder()
    header = (folder / f"msl_{backend}.h").read_text() + (folder / "metal" / "common.metal").read_text()
    named = [f"const Absent {name}, {name}_shape;\n" for name in kernel.absent]
    named += [f"float {name}[1];\n" for name in kernel.unmade]
    bodies = kernel.bodies or (Body(kernel.name),)
    texts = []
    for body in bodies:
        text = (folder / "metal" / f"{body.name}.metal").read_text()
        if body.aliases or len(bodies) > 1:
            text = "".join(f"auto {name} = {array};\n" for name, array in body.aliases) + text
            text = f"{{\n{text}}}\n"
        texts.append(_BEHIND + text if body.behind else text)
    return header, "".join(named + texts)


_BEHIND = "threadgroup_barrier(mem_flags::mem_device);\n"


def included(kernel: Kernel) -> tuple[str, str]:
    """Header and body for CUDA that name files in place of holding them; the texts themselves where there are no files.

    MLX hashes the whole text of a CUDA kernel in every launch, 4 us for 20 kB. The files are copies of their own: MLX
    may build a kernel long after its name was made, and an installation may change in between.
    """
    header, body = texts = source_of(kernel, "cuda")
    paths = [path.as_posix() for text in texts if (path := kept(text)) is not None]
    if len(paths) < len(texts) or not all(path.isprintable() and not set(path) & set('"\\') for path in paths):
        return header, body
    # MLX passes on the shapes whose names it finds here.
    asked = [f"{name}_{what}" for name in kernel.inputs for what in ("shape", "strides", "ndim")]
    shapes = " ".join(name for name in asked if name in body)
    return f'#include "{paths[0]}"\n', f'// {shapes}\n#include "{paths[1]}"\n'


def _folder() -> Path:
    """The kernels that were installed with the package, else those of the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_kernels"
    return installed if installed.is_dir() else package.parent / "kernels"
