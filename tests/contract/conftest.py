"""The devices under contract tests: always the simulated one, and the real one if present."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import pytest
from contract.kernels import SOURCE
from contract.workbench import Workbench

from cudakit.gpu.api import Gpu
from cudakit.gpu.open import open_gpu

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session")
def image() -> Iterator[Callable[[str], bytes]]:
    """Open each device and compile the kernels once per session, because opening a device is slow."""
    images: dict[str, bytes] = {}
    with ExitStack() as stack:

        def compiled(name: str) -> bytes:
            if name not in images:
                gpu = stack.enter_context(closing(open_gpu(name)))
                images[name] = gpu.compile(SOURCE)
            return images[name]

        yield compiled


@pytest.fixture(params=DEVICES)
def bench(request: pytest.FixtureRequest, image: Callable[[str], bytes]) -> Iterator[Workbench]:
    compiled = image(request.param)
    with closing(open_gpu(request.param)) as gpu:
        yield Workbench(gpu, compiled)


@pytest.fixture
def gpu(bench: Workbench) -> Gpu:
    return bench.gpu
