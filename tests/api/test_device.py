from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import cudakit
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.cuda.device import Cuda

without_driver = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)


@without_driver
def test_without_a_driver_nothing_is_available_and_nothing_raises() -> None:
    assert not cudakit.is_available()
    assert cudakit.device_count() == 0
    assert not cudakit.is_initialized()
    assert cudakit.current_device() == 0


@without_driver
@pytest.mark.parametrize(
    "call",
    [
        cudakit.device_name,
        cudakit.capability,
        cudakit.synchronize,
        cudakit.mem_get_info,
        cudakit.profiler.start,
        cudakit.profiler.stop,
        lambda: cudakit.set_device(0),
        lambda: cudakit.device(0).__enter__(),
        lambda: cudakit.can_access_peer(0, 1),
    ],
)
def test_without_a_driver_what_needs_one_says_what_to_install(call: Callable[[], object]) -> None:
    with pytest.raises(cudakit.EnvironmentUnusable, match="libcuda") as caught:
        call()
    assert "driver" in caught.value.hint


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((5, 2), "Maxwell"),
        ((6, 1), "Pascal"),
        ((7, 0), "Volta"),
        ((7, 2), "Volta"),
        ((7, 5), "Turing"),
        ((8, 0), "Ampere"),
        ((8, 6), "Ampere"),
        ((8, 7), "Ampere"),
        ((8, 9), "Ada Lovelace"),
        ((9, 0), "Hopper"),
        ((10, 0), "Blackwell"),
        ((10, 3), "Blackwell"),
        ((11, 0), "Blackwell"),
        ((12, 1), "Blackwell"),
        ((99, 0), "unknown"),
    ],
)
def test_a_capability_names_its_architecture(capability: tuple[int, int], name: str) -> None:
    assert Capability(*capability).architecture == name


def test_a_capability_compares_as_the_pair_that_it_is() -> None:
    assert Capability(9, 0) == (9, 0)
    assert (8, 9) < Capability(9, 0) < (10, 0)
    assert str(Capability(8, 9)) == "8.9"


@pytest.mark.parametrize("stream", ["a stream", None, object(), SimpleNamespace(ptr="no number")])
def test_non_stream_is_refused(stream: object) -> None:
    with pytest.raises(cudakit.UsageError, match="not a CUDA stream"), cudakit.stream(stream):
        pass


class CoreStream:
    """A stream by the protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 2


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (1, 1),
        (2, 2),
        (0, 1),
        (CoreStream(), 2),
        (SimpleNamespace(cuda_stream=2), 2),
        (SimpleNamespace(ptr=2), 2),
        (SimpleNamespace(ptr=0), 1),
    ],
)
def test_a_stream_of_any_library_is_current_within_its_block(stream: object, handle: int) -> None:
    assert cudakit.current_stream() == 1
    with cudakit.stream(stream) as entered:
        assert cudakit.current_stream() == entered == handle
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(cudakit.current_stream).result() == 1
    assert cudakit.current_stream() == 1


@pytest.fixture
def gpu() -> Iterator[Cuda]:
    with closing(Cuda(0)) as gpu:
        yield gpu


COUNTED = """
import os
import cudakit

assert cudakit.is_available() and cudakit.device_count() >= 1
assert not cudakit.is_initialized()
if os.fork() == 0:
    cudakit.synchronize()
    assert cudakit.is_initialized()
    os._exit(0)
_, status = os.wait()
assert status == 0
assert not cudakit.is_initialized()
count = cudakit.device_count()
cudakit.device_name()
assert cudakit.is_initialized() and cudakit.device_count() == count
os.environ["CUDA_VISIBLE_DEVICES"] = ""
assert cudakit.device_count() == count  # too late: the driver has read it
"""

HIDDEN = """
import os
import cudakit

os.environ["CUDA_VISIBLE_DEVICES"] = ""
assert cudakit.device_count() == 0 and not cudakit.is_available()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("script", [COUNTED, HIDDEN])
def test_devices_are_counted_as_cuda_sees_them_and_fork_survives_it(script: str) -> None:
    command = [sys.executable, "-P", "-W", "error", "-c", script]
    completed = subprocess.run(command, capture_output=True, text=True)

    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.gpu
def test_a_device_is_current_within_its_block_and_after_it_was_set(gpu: Cuda) -> None:
    del gpu
    with cudakit.device(0) as entered:
        assert entered == cudakit.current_device() == 0
        cudakit.synchronize()
    cudakit.set_device(0)

    assert cudakit.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ordinal", [-1, 999])
def test_a_number_without_a_device_is_refused(gpu: Cuda, ordinal: int) -> None:
    del gpu
    with pytest.raises(cudakit.CudaError, match=r"INVALID_DEVICE.*cuda:"):
        cudakit.set_device(ordinal)
    with pytest.raises(cudakit.CudaError, match="INVALID_DEVICE"):
        cudakit.device_name(ordinal)
    assert cudakit.current_device() == 0


@pytest.mark.gpu
def test_the_device_is_torchs_too(gpu: Cuda) -> None:
    torch = pytest.importorskip("torch")
    del gpu
    free, total = torch.cuda.mem_get_info(0)

    assert cudakit.device_count() == torch.cuda.device_count()
    assert cudakit.device_name() == torch.cuda.get_device_name()
    assert cudakit.capability() == torch.cuda.get_device_capability()
    info = cudakit.mem_get_info()
    assert (info.free_bytes, info.total_bytes) == (free, total)
    with cudakit.stream(torch.cuda.Stream()):
        assert cudakit.current_device() == torch.cuda.current_device()


@pytest.mark.gpu
def test_profiler_start_and_stop_need_no_profiler(gpu: Cuda) -> None:
    del gpu
    cudakit.profiler.start()
    cudakit.profiler.stop()
