"""The calls of NCCL's C functions, recorded by a stand-in for the library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from cudakit.errors import CollectiveError, EnvironmentUnusable, MissingDependency
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.arrays import ELEMENTS, FP32
from cudakit.gpu.api.collectives import OPERATIONS, Collective
from cudakit.gpu.collectives import (
    LIBRARY_OVERRIDE,
    Nccl,
    NcclCommunicator,
    format_version,
    load_nccl,
    open_collectives,
)
from cudakit.gpu.vendor import CudaDevice

SOURCE = Path(__file__).with_name("fake_nccl.c")
SEND, RECEIVE, STREAM = Ptr(0x1000), Ptr(0x2000), Stream(7)
COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@dataclass
class Device:
    """The methods of a device that NCCL needs; its streams are complete after some queries."""

    queries: int = 0

    def in_context(self, function: Callable[..., Any], *args: object) -> Any:
        return function(*args)

    def stream_address(self, stream: Stream) -> int:
        return 0x5000 + stream

    def query_stream(self, stream: Stream) -> bool:
        assert stream == STREAM
        self.queries -= 1
        return self.queries < 0


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def fake(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setenv(LIBRARY_OVERRIDE, str(fake_library))
    library = ctypes.CDLL(str(fake_library))
    library.fake_calls.restype = ctypes.c_char_p
    library.fake_reset(0, 0)
    yield library
    library.fake_reset(0, 0)


def nccl(device: Device | None = None) -> Nccl:
    return Nccl(cast(CudaDevice, device or Device()))


def connected(rank: int = 1, ranks: int = 3, device: Device | None = None) -> NcclCommunicator:
    library = nccl(device)
    return library.connect(library.unique_id("host"), rank, ranks)


def calls(fake: ctypes.CDLL) -> list[str]:
    return fake.fake_calls().decode().splitlines()


EXPECTED = {
    "all-reduce": ["all-reduce 0x1000 0x2000 8 7 op 0 0xc0 0x5007"],
    "all-gather": ["all-gather 0x1000 0x2000 8 7 0xc0 0x5007"],
    "reduce-scatter": ["reduce-scatter 0x1000 0x2000 8 7 op 0 0xc0 0x5007"],
    "broadcast": ["broadcast 0x1000 0x2000 8 7 root 0 0xc0 0x5007"],
    "reduce": ["reduce 0x1000 0x2000 8 7 op 0 root 0 0xc0 0x5007"],
    "all-to-all": [
        "start",
        "send 0x1000 8 7 to 0 0xc0 0x5007",
        "send 0x1020 8 7 to 1 0xc0 0x5007",
        "send 0x1040 8 7 to 2 0xc0 0x5007",
        "receive 0x2000 8 7 from 0 0xc0 0x5007",
        "receive 0x2020 8 7 from 1 0xc0 0x5007",
        "receive 0x2040 8 7 from 2 0xc0 0x5007",
        "end",
    ],
    "send-receive": [
        "start",
        "send 0x1000 8 7 to 2 0xc0 0x5007",
        "receive 0x2000 8 7 from 0 0xc0 0x5007",
        "end",
    ],
}


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_calls_the_functions_of_nccl(fake: ctypes.CDLL, operation: str) -> None:
    communicator = connected()
    communicator.enqueue(Collective(operation, FP32, 8), SEND, RECEIVE, STREAM)

    assert calls(fake) == ["init 1 of 3, id 0 127", *EXPECTED[operation]]


@needs_compiler
def test_data_types_have_the_values_of_nccl(fake: ctypes.CDLL) -> None:
    communicator = connected()
    for element in ELEMENTS.values():
        communicator.enqueue(Collective("all-gather", element, 1), SEND, RECEIVE, STREAM)

    values = [line.split()[4] for line in calls(fake)[1:]]
    # fp64, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8 and int32 in ncclDataType_t.
    assert values == ["8", "7", "6", "9", "10", "11", "0", "2"]


@needs_compiler
def test_failed_call_names_the_function_and_the_reason(fake: ctypes.CDLL) -> None:
    communicator = connected()
    fake.fake_reset(2, 0)

    with pytest.raises(CollectiveError, match="ncclAllReduce failed: unhandled system error"):
        communicator.enqueue(Collective("all-reduce", FP32, 8), SEND, RECEIVE, STREAM)


@needs_compiler
def test_synchronize_polls_the_stream(fake: ctypes.CDLL) -> None:
    device = Device(queries=5)
    connected(device=device).synchronize(STREAM)

    assert device.queries == -1
    assert len(calls(fake)) == 1


@needs_compiler
def test_abort_ends_a_wait_and_aborts_the_communicator(fake: ctypes.CDLL) -> None:
    communicator = connected(device=Device(queries=10**9))
    communicator.abort()

    with pytest.raises(CollectiveError, match="aborted"):
        communicator.synchronize(STREAM)
    with pytest.raises(CollectiveError, match="aborted"):
        communicator.enqueue(Collective("all-reduce", FP32, 8), SEND, RECEIVE, STREAM)
    communicator.close()
    assert calls(fake)[1:] == ["abort 0xc0"]


@needs_compiler
def test_asynchronous_error_of_another_rank_ends_a_wait(fake: ctypes.CDLL) -> None:
    communicator = connected(device=Device(queries=10**9))
    fake.fake_reset(0, 6)

    with pytest.raises(CollectiveError, match="another rank failed"):
        communicator.synchronize(STREAM)
    communicator.close()
    assert calls(fake) == ["abort 0xc0"]


@needs_compiler
def test_close_destroys_the_communicator_once(fake: ctypes.CDLL) -> None:
    communicator = connected()
    communicator.close()
    communicator.close()

    assert calls(fake)[1:] == ["destroy 0xc0"]


@needs_compiler
@pytest.mark.usefixtures("fake")
def test_version_and_path_of_the_library_are_recorded(fake_library: Path) -> None:
    library = nccl()

    assert (library.version, library.path) == ("2.28.9", str(fake_library))


@needs_compiler
def test_library_of_an_installed_wheel_is_found(
    fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "nvidia" / "nccl" / "lib"
    directory.mkdir(parents=True)
    shutil.copy(fake_library, directory)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert load_nccl()[1] == str(directory / "libnccl.so.2")


def test_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [name for name in sys.path if not (Path(name) / "nvidia" / "nccl").exists()]
    monkeypatch.setattr(sys, "path", directories)
    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError:
        with pytest.raises(MissingDependency) as raised:
            load_nccl()
        assert raised.value.hint == "pip install 'cudakit[nccl]'"
    else:
        pytest.skip("the system has NCCL")


def test_damaged_library_is_an_error_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "libnccl.so.2"
    file.write_text("no library")
    monkeypatch.setenv(LIBRARY_OVERRIDE, str(file))

    with pytest.raises(EnvironmentUnusable, match="cannot be loaded") as raised:
        load_nccl()
    assert LIBRARY_OVERRIDE in raised.value.hint


@needs_compiler
def test_library_without_a_needed_function_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "old.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *v) { *v = 2400; return 0; }")
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv(LIBRARY_OVERRIDE, str(library))

    with pytest.raises(EnvironmentUnusable, match="too old"):
        load_nccl()


@pytest.mark.parametrize(
    ("number", "text"), [(22809, "2.28.9"), (23203, "2.32.3"), (20901, "2.9.1"), (2804, "2.8.4")]
)
def test_version_number_is_formatted(number: int, text: str) -> None:
    assert format_version(number) == text


# --- torch.distributed as a library of collective operations, without a GPU ------------------------


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_missing_torch_names_the_package() -> None:
    with pytest.raises(MissingDependency, match="torch is not installed") as raised:
        open_collectives(cast(CudaDevice, None), "torch")

    assert raised.value.hint == "pip install 'torch'"
