"""What a GPU really runs for one evaluated step of each method, noted by NVIDIA's CUPTI.

    python benchmarks/launch_trace.py [--layers 1] [--budget 2048] [--library launch_trace.so] [--json FILE]

With several layers in one evaluation, whose caches push each other out of the GPU's own, the figures are per layer,
and a kernel's time is the mean of its launches. CUPTI notes every kernel, copy and fill, those of CUDA graphs one by
one. The library is built from launch_trace.c with gcc and CUPTI's headers where it is not given.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import reporting

SOURCE = Path(__file__).with_name("launch_trace.c")
LIBRARIES = ("nvidia/cu1*/lib", "nvidia/cuda_cupti/lib")
TOOLKITS = ("/usr/local/cuda*/extras/CUPTI", "/usr/local/cuda*", "/usr/local/cuda*/targets/x86_64-linux")
ROUNDS = 3  # the fewest launches of so many steps count; one may also refill a pool


class Ran(NamedTuple):
    """What the GPU ran."""

    kernels: tuple[str, ...]  # names without template arguments and parameters
    seconds: float  # of the kernels, one after the other
    copies: int
    fills: int
    each: tuple[float, ...] = ()  # seconds of each kernel


def read(text: str) -> Ran:
    """The lines of launch_trace.c."""
    kernels, each = [], []
    lines = text.splitlines()
    for line in lines:
        if line.startswith("K "):
            _, taken, name = line.split(" ", 2)
            kernels.append(short(name))
            each.append(float(taken))
    copies, fills = (sum(line.startswith(f"{kind} ") for line in lines) for kind in "CF")
    return Ran(tuple(kernels), sum(each), copies, fills, tuple(each))


def per_layer(ran: Ran, layers: int) -> Ran:
    """One layer's share: every kernel once for each launch of a layer, with the mean of its times."""
    if layers == 1:
        return ran
    kernels: list[str] = []
    each: list[float] = []
    for name in dict.fromkeys(ran.kernels):
        times = [taken for kernel, taken in zip(ran.kernels, ran.each, strict=True) if kernel == name]
        count = max(1, round(len(times) / layers))
        kernels += [name] * count
        each += [sum(times) / len(times)] * count
    return Ran(tuple(kernels), ran.seconds / layers, ran.copies, ran.fills, tuple(each))


def short(mangled: str) -> str:
    """The readable part of a mangled name: "_ZN3mlx4core2cu9copy_gemm..." is "copy_gemm", ours are their bodies."""
    if ours := re.search(r"custom_kernel_veloxfn_(\w+?)_[0-9a-f]{12}", mangled):
        return ours[1]
    parts, rest = [], re.sub(r"^_ZN?", "", mangled)
    if rest == mangled:
        return mangled
    while found := re.match(r"(\d+)", rest):
        size = int(found[1])
        parts.append(rest[found.end() : found.end() + size])
        rest = rest[found.end() + size :]
    return (parts[-1] if parts else mangled)[:40]


class Trace:
    """CUPTI, noting from now on; begin before the first array is computed."""

    def __init__(self, library: Path | None) -> None:
        ctypes.CDLL(_cupti(), mode=ctypes.RTLD_GLOBAL)
        with tempfile.TemporaryDirectory() as folder:
            self._library = ctypes.CDLL(str(library.resolve() if library else _built(Path(folder))))
        self._library.trace_take.restype = self._library.trace_error.restype = ctypes.c_char_p
        if error := self._library.trace_start():
            raise RuntimeError(f"CUPTI does not start: {self._library.trace_error(error).decode()}")

    def take(self) -> Ran:
        """What ran since the last time."""
        import mlx.core as mx

        mx.synchronize()
        return read(self._library.trace_take().decode())


def _cupti() -> str:
    """CUPTI's library: of the Python packages, else of a toolkit."""
    roots = [*sys.path, *site.getsitepackages(), "/opt/*/.venv/lib/python*/site-packages"]
    folders = [f"{root}/{part}" for root in roots for part in LIBRARIES]
    folders += [f"{kit}/{part}" for kit in TOOLKITS for part in ("lib64", "lib")]
    for folder in folders:
        if found := sorted(glob.glob(f"{folder}/libcupti.so.1*")):
            return found[0]
    raise RuntimeError("libcupti is in none of the usual folders")


def _built(folder: Path) -> Path:
    """The library, built."""
    headers = [path for kit in TOOLKITS for path in glob.glob(f"{kit}/include/cupti_activity.h")]
    if not headers:
        raise RuntimeError("CUPTI's headers are in none of the usual folders: give --library")
    records = {}
    for name, record in (("KERNEL", "Kernel"), ("COPY", "Memcpy"), ("FILL", "Memset")):
        every = re.findall(rf"}} (CUpti_Activity{record}\d+);", Path(headers[0]).read_text(encoding="utf-8"))
        records[name] = max(every, key=lambda kind: int(re.sub(r"\D", "", kind)))
    made = folder / "launch_trace.so"
    defines = [f"-D{name}_RECORD={record}" for name, record in records.items()]
    include = f"-I{Path(headers[0]).parent}"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", include, *defines, str(SOURCE), "-o", str(made)], check=True)
    return made


def steps(trace: Trace, count: int, budget: int) -> Iterator[dict[str, Any]]:
    """One compiled step of every method in steady state, so many layers, and attention alone."""
    import layers
    import mlx.core as mx
    from sides import Shape

    import kernels

    shape = Shape(32, 128, 1, budget)
    for method in (*kernels.METHODS, "h2o age-normalised"):
        config = kernels.config_of(method, shape.budget)
        for name, make in (
            ("write, attend, evict", layers.decoding),
            ("attend, evict", layers.attending_only),
            ("write, score, evict", layers.updating),
            ("attend, then evict", layers.attending_apart),
        ):
            if make is layers.attending_apart and not layers.ranks_by_output(config):
                continue
            made = layers.own(make, config, shape, mx.float16, count)
            yield _told(method, name, shape, per_layer(_fewest(trace, made), count))
    alone = _fewest(trace, layers.sdpa(shape, mx.float16, count))
    yield _told("-", "attention alone", shape, per_layer(alone, count))


def _fewest(trace: Trace, made: Any) -> Ran:
    for _ in range(3):
        made()
    trace.take()
    every = []
    for _ in range(ROUNDS):
        made()
        every.append(trace.take())
    return min(every, key=lambda ran: (len(ran.kernels) + ran.copies + ran.fills, ran.seconds))


def _told(method: str, step: str, shape: Any, ran: Ran) -> dict[str, Any]:
    sizes = {**shape._asdict(), "dtype": "float16"}
    return {"method": method, "step": step, **sizes, **ran._asdict(), "launches": len(ran.kernels)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, metavar="FILE", help="launch_trace.c, built already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="in one evaluation (default 1)")
    parser.add_argument("--budget", type=int, default=2048, metavar="ROWS", help="default 2048")
    options = parser.parse_args(arguments)
    trace = Trace(options.library)
    rows = []
    print(reporting.head("method", "step", "kernels", "copies", "fills", "GPU time", "names, us"), flush=True)
    for told in steps(trace, options.layers, options.budget):
        rows.append(told)
        figures = (told["launches"], told["copies"], told["fills"], f"{told['seconds'] * 1e6:.1f} us")
        names = [f"{name} {taken * 1e6:.1f}" for name, taken in zip(told["kernels"], told["each"], strict=True)]
        print(reporting.row(told["method"], told["step"], *figures, ", ".join(names)), flush=True)
        reporting.write(options.json, "mlx-cuda-13", script="launch_trace", layers=options.layers, rows=rows)
    print(json.dumps({"rows": len(rows)}))


if __name__ == "__main__":
    main()
