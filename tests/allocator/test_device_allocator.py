"""The end of an allocator: close, garbage collection, interpreter exit and fork, on a simulated device."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from cudakit.api.allocator import CachingAllocator
from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu.api import Ptr
from cudakit.gpu.sim import Sim


def opened(sim: Sim, *, owned: bool = True) -> CachingAllocator:
    if not owned:
        return CachingAllocator(sim, settings="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cudakit.api.allocator.open_gpu", lambda _: sim)
        return CachingAllocator("sim", settings="")


def is_closed(sim: Sim) -> bool:
    try:
        sim.memory_info()
    except CudaError:
        return True
    return False


def used_bytes(sim: Sim) -> int:
    info = sim.memory_info()
    return info.total_bytes - info.free_bytes


def test_close_closes_an_owned_device_with_live_memory() -> None:
    sim = Sim()
    allocator = opened(sim)
    allocator.alloc(1000)

    allocator.close()
    allocator.close()

    assert is_closed(sim)


def test_close_leaves_a_passed_in_device_open() -> None:
    sim = Sim()
    allocator = opened(sim, owned=False)
    allocator.free(allocator.alloc(1000))

    allocator.close()

    assert used_bytes(sim) == 0


def test_closed_allocator_refuses_allocations_and_ignores_frees() -> None:
    allocator = opened(Sim())
    ptr = allocator.alloc(1000)
    allocator.close()

    allocator.free(ptr)
    with pytest.raises(EnvironmentUnusable, match="was closed"):
        allocator.alloc(1)


@pytest.mark.parametrize("call", ["share", "ipc_handle", "open_shared", "enable_peer_access"])
def test_closed_allocator_refuses_sharing_and_peer_access(call: str) -> None:
    allocator = opened(Sim())
    allocator.close()

    with pytest.raises(EnvironmentUnusable, match="was closed"):
        getattr(allocator, call)(1)


def test_opened_memory_keeps_the_device_of_its_allocator_open() -> None:
    exporting_gpu = Sim()
    exporter = opened(exporting_gpu, owned=False)
    sim = Sim(same_machine_as=exporting_gpu)
    memory = opened(sim).open_shared(exporter.share(exporter.alloc(1000)))
    gc.collect()
    assert not is_closed(sim)

    memory.close()
    del memory
    gc.collect()
    assert is_closed(sim)


def test_collected_allocator_closes_its_own_device() -> None:
    sim = Sim()
    allocator = opened(sim)
    allocator.alloc(1000)

    del allocator
    gc.collect()

    assert is_closed(sim)


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_collected_allocator_frees_all_its_memory_on_a_device_it_does_not_own(config: str) -> None:
    sim = Sim()
    allocator = CachingAllocator(sim, settings=config)
    allocator.alloc(1000)
    allocator.free(allocator.alloc(1 << 25))
    allocator.free(allocator.alloc(1 << 20), sim.stream())  # waits for an event
    pinned = allocator.pinned.alloc(1000)
    assert used_bytes(sim) > 0

    del allocator
    gc.collect()

    assert used_bytes(sim) == 0
    with pytest.raises(CudaError):
        sim.host_free(Ptr(pinned))


def test_closed_allocator_keeps_live_memory_of_a_device_it_does_not_own_until_it_is_collected() -> (
    None
):
    sim = Sim()
    allocator = opened(sim, owned=False)
    allocator.alloc(1000)

    allocator.close()
    assert used_bytes(sim) == 2 << 20
    del allocator
    gc.collect()
    assert used_bytes(sim) == 0


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_collection_of_an_allocator_does_not_end_a_graph_capture(config: str) -> None:
    sim = Sim()
    allocator = CachingAllocator(sim, settings=config)
    allocator.alloc(1000)
    stream = sim.stream(blocking=False)
    sim.capture_begin(stream)

    del allocator
    gc.collect()

    assert used_bytes(sim) == 0
    sim.destroy_graph(sim.capture_end(stream))


HEAD = """
import os
import cudakit
allocator = cudakit.CachingAllocator("sim", settings="")
ptr = allocator.alloc(1000)
"""

FORKED = """
import threading, warnings
inside, go = threading.Event(), threading.Event()
def hold():
    with allocator._guard.locked():
        inside.set()
        go.wait()
threading.Thread(target=hold).start()
inside.wait()
with warnings.catch_warnings():  # what Python 3.12 warns of is what is tested
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    child = os.fork()
if not child:
    allocator.free(ptr)
    allocator.empty_cache()
    try:
        allocator.alloc(1)
    except Exception as error:
        print(type(error).__name__, allocator.statistics()["allocation.all.current"], flush=True)
    allocator.close()
    os._exit(0)
go.set()
print(os.waitpid(child, 0)[1])
allocator.free(ptr)
print(allocator.statistics()["allocation.all.current"])
"""

# Exit handlers run in reverse order of their registration.
REGISTERED_BEFORE = """
import atexit
@atexit.register
def last():
    global array
    del array
    print(allocator.statistics()["allocation.all.current"])
"""

ENDING = """
class Array:
    def __del__(self):
        allocator.free(ptr)
array = Array()
"""


def lines_of(script: str) -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-P", "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.stderr == ""
    return completed.stdout.splitlines()


def test_forked_child_refuses_allocations_even_if_the_lock_was_held() -> None:
    assert lines_of(HEAD + FORKED) == ["ForkedAllocator 1", "0", "0"]


def test_interpreter_exit_frees_nothing() -> None:
    assert lines_of(REGISTERED_BEFORE + HEAD + ENDING) == ["1"]
