"""Memory of a real device between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

import cudakit
from cudakit.api.allocator import CachingAllocator
from cudakit.errors import CudaError, EnvironmentUnusable, UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.open import open_gpu
from cudakit.torch_rules.settings import Settings

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 45 * MIB + 5
SETTINGS = ("expandable_segments:False", "expandable_segments:True")

# Reads and writes the first and the last byte of the shared memory, and closes it.
RECEIVER = """
import sys
import cudakit
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.open import open_gpu

gpu = open_gpu("cuda")
allocator = cudakit.CachingAllocator(gpu, settings=sys.argv[1])
host = gpu.host_malloc(2)

def ends(memory):
    for at, place in ((0, memory.ptr), (1, memory.ptr + memory.size_bytes - 1)):
        gpu.copy(Ptr(host + at), Ptr(place), 1, LEGACY)
    gpu.sync()
    return bytes(gpu.host_view(host, 2)).hex()

shared = [cudakit.SharedMemory.from_text(line) for line in sys.stdin]
try:
    with allocator.open_shared(shared[0]) as memory, allocator.open_shared(shared[0]) as again:
        print(memory.ptr == again.ptr, memory.size_bytes, ends(memory), flush=True)
        if len(shared) > 1:
            beside = allocator.open_shared(shared[1])
            print(ends(beside))
            beside.close()
        gpu.fill(memory.ptr, 0x5A, memory.size_bytes, LEGACY)
        gpu.sync()
    again = allocator.open_shared(shared[0])
    print(ends(again))
except cudakit.CudakitError as error:
    print(type(error).__name__, error, "|", error.hint)
"""

# Shares memory, and ends.
SENDER = """
import sys
import cudakit
allocator = cudakit.CachingAllocator(0, settings=sys.argv[1])
print(allocator.share(allocator.alloc(1 << 20)).as_text())
"""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with closing(open_gpu("cuda")) as gpu:
        yield gpu


def python(script: str, settings: str, *lines: str, **environment: str) -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-P", "-c", script, settings],
        check=False,
        input="\n".join(lines),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


def lines_unless_forbidden(lines: list[str]) -> list[str]:
    """Return the lines; skip the test if the system forbids memory sharing."""
    if "Error" in lines[0] or "Unusable" in lines[0]:
        assert "--cap-add=SYS_PTRACE" in lines[0], lines
        pytest.skip(lines[0])
    return lines


def byte_at(gpu: Gpu, ptr: int) -> int:
    host = gpu.host_malloc(1)
    gpu.copy(host, Ptr(ptr), 1, LEGACY)
    gpu.sync()
    return gpu.host_view(host, 1)[0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_child_process_reads_and_writes_shared_memory(gpu: Gpu, settings: str) -> None:
    allocator = cudakit.CachingAllocator(gpu, settings=settings)
    below, block, above = (allocator.alloc(size) for size in (3 * MIB, SIZE, 3 * MIB))
    for ptr, value, size in ((below, 1, 3 * MIB), (block, 2, SIZE), (above, 3, 3 * MIB)):
        gpu.fill(ptr, value, size, LEGACY)
    gpu.fill(Ptr(block + SIZE - 1), 9, 1, LEGACY)
    gpu.sync()
    texts = [allocator.share(ptr).as_text() for ptr in (block, above)]

    lines = lines_unless_forbidden(python(RECEIVER, settings, *texts))

    assert lines == [f"True {SIZE} 0209", "0303", "5a5a"]
    assert [byte_at(gpu, ptr) for ptr in (block, block + SIZE - 1)] == [0x5A, 0x5A]
    assert [byte_at(gpu, below + 3 * MIB - 1), byte_at(gpu, above)] == [1, 3]
    for ptr in (below, block, above):
        allocator.free(ptr)
    allocator.close()


def test_shared_pages_are_released_to_the_device(gpu: Gpu) -> None:
    allocator = cudakit.CachingAllocator(gpu, settings=SETTINGS[1])
    warm = allocator.alloc(MIB)
    gpu.sync()
    free_bytes = gpu.memory_info().free_bytes
    block = allocator.alloc(200 * MIB)
    assert len(allocator.share(block).handles) >= 10
    allocator.free(block)
    allocator.empty_cache()

    assert gpu.memory_info().free_bytes >= free_bytes - 4 * MIB
    allocator.free(warm)
    allocator.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_memory_of_an_ended_process_cannot_be_opened(gpu: Gpu, settings: str) -> None:
    allocator = cudakit.CachingAllocator(gpu, settings=settings)
    (text,) = python(SENDER, settings)

    with pytest.raises((EnvironmentUnusable, CudaError)) as caught:
        allocator.open_shared(cudakit.SharedMemory.from_text(text))
    assert caught.value.message
    assert allocator.alloc(MIB)


@pytest.mark.parametrize("settings", SETTINGS)
def test_process_cannot_open_its_own_memory(gpu: Gpu, settings: str) -> None:
    allocator = cudakit.CachingAllocator(gpu, settings=settings)

    with pytest.raises(UsageError, match="this process shared"):
        allocator.open_shared(allocator.share(allocator.alloc(MIB)))


def test_environment_variable_turns_off_page_handles(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")
    allocator = cudakit.CachingAllocator(gpu, settings=SETTINGS[1])

    with pytest.raises(cudakit.CudakitError, match="without a shareable handle"):
        allocator.share(allocator.alloc(MIB))


def test_shared_memory_names_its_device_and_process(gpu: Gpu) -> None:
    allocator = CachingAllocator(gpu, settings=Settings(expandable_segments=True).as_text())
    shared = allocator.share(allocator.alloc(SIZE))

    assert shared.size_bytes == SIZE
    assert shared.process == gpu.process
    assert shared.device == str(gpu.facts().uuid)
