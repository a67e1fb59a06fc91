"""What the figures were measured on, and a fair start for them: the same BLAS under every side."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx

__all__ = ["describe", "openblas_preloaded", "prefer_openblas"]

_ASKED = "VELOXFN_BENCH_PRELOAD"


def openblas_preloaded() -> bool:
    """Whether this process was started with OpenBLAS preloaded."""
    return "openblas" in os.environ.get("LD_PRELOAD", "")


def prefer_openblas() -> None:
    """Start this script again with OpenBLAS preloaded, where the system has it (Linux; once, never required).

    MLX's CPU wheel calls whatever BLAS the loader finds first. The reference BLAS of many distributions is several
    times slower, for both sides of a comparison.
    """
    library = ctypes.util.find_library("openblas")
    if sys.platform != "linux" or library is None or openblas_preloaded() or os.environ.get(_ASKED):
        return
    preload = " ".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "LD_PRELOAD": preload, _ASKED: "1"})


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(*packages: str) -> dict[str, object]:
    """Device, processor, Python and package versions, and whether OpenBLAS is preloaded, for the JSON report."""
    versions: dict[str, str] = {}
    for package in ("mlx", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": str(mx.default_device()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "openblas_preloaded": openblas_preloaded(),
    }
