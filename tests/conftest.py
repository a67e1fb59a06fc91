"""Back ends that run kernels on this machine; their names are in the ids of the tests that use `backend`."""

import math
import sys

import mlx.core as mx
import pytest

from veloxfn import steady
from veloxfn.ops import launch
from veloxfn.testing import emulation

BACKENDS = [
    *(["host"] if emulation.available() else []),
    *(["cuda"] if mx.cuda.is_available() else []),
    *(["metal"] if mx.metal.is_available() else []),
]
_NONE = pytest.param(None, marks=pytest.mark.skip(reason="host needs g++ on Linux; neither CUDA nor Metal is here"))


@pytest.fixture(params=BACKENDS or [_NONE])
def backend(request, monkeypatch):
    """A back end for kernels, whose outputs hold NaN before they run."""
    monkeypatch.setattr(launch, "POISON", math.nan)
    steady.forget()
    return request.param


@pytest.fixture
def forced(backend, monkeypatch):
    """The same back end, which every op takes that is not told otherwise."""
    monkeypatch.setattr(launch, "FORCED", backend)
    return backend


@pytest.fixture
def launched(monkeypatch):
    """(name, back end) of the kernels that ops launch, as they are asked for: by every call, none is traced."""
    monkeypatch.setattr(steady, "TRACING", ())
    names, run = [], launch.launch

    def noting(kernel, backend, *given, **more):
        names.append((kernel.name, backend))
        return run(kernel, backend, *given, **more)

    for name, module in list(sys.modules.items()):
        if name.startswith("veloxfn.ops.") and getattr(module, "launch", None) is run:
            monkeypatch.setattr(module, "launch", noting)
    return names
