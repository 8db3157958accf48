"""The caching allocator as programs have it, on the simulated device."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cudakit
from cudakit.api.allocator import CachingAllocator
from cudakit.arrays.plugs.libraries import UNUSED_STREAM
from cudakit.errors import CudaError, EnvironmentUnusable, Unsupported, UsageError
from cudakit.gpu.api import Ptr
from cudakit.gpu.sim import Sim

MIB = 1 << 20
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC",
)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def allocator() -> Iterator[cudakit.CachingAllocator]:
    new_allocator = cudakit.CachingAllocator("sim")
    yield new_allocator
    new_allocator.close()


def test_freed_block_serves_the_next_request(allocator: cudakit.CachingAllocator) -> None:
    first = allocator.alloc(MIB)
    allocator.free(first)

    assert allocator.alloc(MIB) == first
    assert allocator.statistics()["segment.all.current"] == 1


def test_caching_allocator_is_a_class_with_its_public_name() -> None:
    assert isinstance(cudakit.CachingAllocator, type)
    assert cudakit.CachingAllocator.__qualname__ == "CachingAllocator"
    home = importlib.import_module("cudakit.api.allocator")
    assert home.CachingAllocator is cudakit.CachingAllocator


def test_simulated_model_is_chosen_by_name() -> None:
    first, second = cudakit.CachingAllocator("sim:h200"), cudakit.CachingAllocator("sim:a100-mig")

    assert first.memory_info().total_bytes > second.memory_info().total_bytes


def test_passed_in_device_keeps_its_ordinal_and_stays_open() -> None:
    sim = Sim("h200x2", ordinal=1)
    allocator = cudakit.CachingAllocator(sim)
    allocator.close()

    assert allocator.device == 1
    assert sim.memory_info().free_bytes > 0


def test_unknown_device_name_is_refused() -> None:
    with pytest.raises(UsageError, match="no such device: 'cuda:0'"):
        cudakit.CachingAllocator("cuda:0")


def test_settings_argument_has_priority_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert cudakit.CachingAllocator("sim").settings.max_split_size_bytes == 64 * MIB

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("CUDAKIT_ALLOC_CONF", "max_split_size_mb:128")
    assert cudakit.CachingAllocator("sim").settings.max_split_size_bytes == 128 * MIB

    configured_allocator = cudakit.CachingAllocator("sim", settings="max_split_size_mb:256")
    assert configured_allocator.settings.max_split_size_bytes == 256 * MIB


def test_invalid_settings_error_names_the_position() -> None:
    with pytest.raises(cudakit.SettingRefused, match=r"settings 'gc.*', character 1: .*'gc'"):
        cudakit.CachingAllocator("sim", settings="gc:0.5")


@pytest.mark.parametrize(
    "settings",
    [
        "max_split_size_mb:abc",
        "expandable_segments:maybe",
        "per_process_memory_fraction:2",
        "foo:1",
        "expandable_segments_reserve:9",
        "max_split_size_mb",
    ],
)
def test_every_invalid_setting_is_refused_with_the_same_class(settings: str) -> None:
    with pytest.raises(cudakit.SettingRefused):
        cudakit.CachingAllocator("sim", settings=settings)


def test_snapshot_is_readable_by_memviz(
    allocator: cudakit.CachingAllocator, tmp_path: Path
) -> None:
    allocator.record_history()
    kept_ptr = allocator.alloc(3 * MIB)
    allocator.free(allocator.alloc(MIB, UNUSED_STREAM), 0)  # as Numba's memory is used
    snapshot = allocator.snapshot()
    place = tmp_path / "snapshot.pickle"
    allocator.save_snapshot(place)

    result = cudakit.memviz(place)

    assert json.loads(json.dumps(snapshot))["segments"]
    held = result.devices[0]
    assert held.peak.requested_bytes == 4 * MIB
    assert any(
        "test_allocator.py" in frame.filename for holder in held.holders for frame in holder.stack
    )
    allocator.free(kept_ptr)


def test_memory_of_the_unused_stream_is_pending_until_the_cache_is_emptied(
    allocator: cudakit.CachingAllocator,
) -> None:
    first = allocator.alloc(MIB, UNUSED_STREAM)
    allocator.free(first, 1)
    assert allocator.statistics()["active.all.current"] == 1

    allocator.empty_cache()
    assert allocator.statistics()["active.all.current"] == 0


def test_shared_memory_round_trips_through_text(
    allocator: cudakit.CachingAllocator,
) -> None:
    shared = allocator.share(allocator.alloc(1000))

    assert isinstance(shared, cudakit.SharedMemory)
    assert cudakit.SharedMemory.from_text(shared.as_text()) == shared
    with pytest.raises(UsageError, match="this process shared"):
        allocator.open_shared(shared)


@pytest.mark.parametrize(("value", "forbidden"), [(None, False), ("1", False), ("0", True)])
def test_environment_variable_turns_off_page_handles(
    monkeypatch: pytest.MonkeyPatch, value: str | None, *, forbidden: bool
) -> None:
    if value:
        monkeypatch.setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", value)
    new_allocator = cudakit.CachingAllocator("sim", settings="expandable_segments:True")
    ptr = new_allocator.alloc(1000)

    if forbidden:
        with pytest.raises(Unsupported, match="without a shareable handle"):
            new_allocator.share(ptr)
    else:
        assert new_allocator.share(ptr).page_bytes == 2 * MIB


@pytest.mark.parametrize(("value", "cached"), [(None, True), ("0", True), ("1", False)])
def test_environment_variable_turns_off_caching(
    monkeypatch: pytest.MonkeyPatch, value: str | None, *, cached: bool
) -> None:
    if value:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", value)
    sim = Sim()
    allocator = cudakit.CachingAllocator(sim)
    free = sim.memory_info().free_bytes
    ptr = allocator.alloc(1000)
    counted = allocator.statistics()["allocation.all.current"]
    allocator.free(ptr)

    assert counted == cached
    assert (sim.memory_info().free_bytes < free) == cached
    allocator.enable_caching(enabled=True)
    allocator.free(allocator.alloc(1000))
    assert sim.memory_info().free_bytes < free


def test_mem_pool_snapshot_has_only_its_segments(allocator: cudakit.CachingAllocator) -> None:
    with cudakit.MemPool(allocator) as pool:
        with allocator.use_pool(pool):
            ptr = allocator.alloc(MIB)

        assert [segment["segment_pool_id"] for segment in pool.snapshot()] == [pool.id]
        allocator.free(ptr)


def test_out_of_memory_is_a_memory_error_and_a_cuda_error(
    allocator: cudakit.CachingAllocator,
) -> None:
    for caching in (True, False):
        allocator.enable_caching(enabled=caching)
        with pytest.raises(MemoryError) as caught:
            allocator.alloc(1 << 50)
        assert isinstance(caught.value, cudakit.OutOfMemory)
        assert isinstance(caught.value, cudakit.CudaError)
    with pytest.raises(MemoryError, match="pinned"):
        allocator.pinned.alloc(1 << 55)


def test_closing_a_graph_memory_during_its_capture_raises_pool_error(
    allocator: cudakit.CachingAllocator,
) -> None:
    with allocator.capture() as memory:
        assert isinstance(memory, cudakit.GraphMemory)
        with pytest.raises(cudakit.PoolError, match="still routed to"):
            memory.close()


def test_double_free_raises_a_usage_error(allocator: cudakit.CachingAllocator) -> None:
    ptr = allocator.alloc(MIB)
    allocator.free(ptr)

    with pytest.raises(cudakit.InvalidPointer, match="it was freed before") as caught:
        allocator.free(ptr)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2


def test_negative_size_raises_a_usage_error_that_is_a_value_error(
    allocator: cudakit.CachingAllocator,
) -> None:
    with pytest.raises(cudakit.InvalidSize, match="cannot allocate -5 bytes") as caught:
        allocator.alloc(-5)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_snapshot_includes_pinned_memory(allocator: cudakit.CachingAllocator) -> None:
    ptr = allocator.pinned.alloc(MIB)

    assert allocator.pinned is allocator.pinned
    assert len(allocator.snapshot()["host_segments"]) == 1
    allocator.pinned.free(ptr)


def test_memory_resource_creates_an_allocator_or_uses_the_given_one(
    allocator: cudakit.CachingAllocator,
) -> None:
    new_allocator = cudakit.CachingMemoryResource("sim", settings="max_split_size_mb:64")
    configured_allocator = cudakit.CachingMemoryResource(allocator=allocator)

    assert new_allocator.allocator.settings.max_split_size_bytes == 64 * MIB
    assert configured_allocator.allocator is allocator
    assert isinstance(configured_allocator, cudakit.CachingMemoryResource)


WITHOUT_CUDA_CORE = """
import sys
sys.modules["cuda.core"] = None
import cudakit
from cudakit import *
try:
    cudakit.CachingMemoryResource(0)
except cudakit.MissingDependency as error:
    print(error.hint)
"""


def test_memory_resource_without_cuda_core_names_the_package_to_install() -> None:
    completed = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_CUDA_CORE], check=True, capture_output=True, text=True
    )

    assert completed.stdout == "pip install 'cuda-core>=1,<2'\n"


def test_numba_module_has_the_memory_manager() -> None:
    pytest.importorskip("numba.cuda")
    module = importlib.import_module("cudakit.api.numba")

    assert module._numba_memory_manager(context=None).interface_version == 1


def test_numba_module_has_no_other_attribute() -> None:
    pytest.importorskip("numba.cuda")
    module = importlib.import_module("cudakit.api.numba")

    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = module.other


# --- The end of an allocator: close, garbage collection, interpreter exit and fork, on a simulated device ---


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
    with allocator._guard:
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
