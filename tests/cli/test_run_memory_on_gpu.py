"""``run --memory`` on a GPU: the totals of snapshots equal the counters of the driver and of the pools.

Sizes are multiples of 2 MiB, the granularity in which the driver gives memory to a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from arrays.plugs.viewers import opened_by_all

import cudakit
from cudakit.memory.snapshot import POOL_IDS
from cudakit.memory.torch_snapshot import read_snapshot

pytestmark = pytest.mark.gpu

MIB = 1 << 20

# Prints the counters that the program adds to ``counters`` as its last line.
BEGIN = """
import atexit, json
counters = {}
atexit.register(lambda: print(json.dumps(counters), flush=True))
"""


@dataclass
class Run:
    """A program that was run with --memory, and the counters that it printed."""

    counters: dict[str, int]
    path: Path
    stderr: str

    @property
    def snapshot(self) -> dict[str, Any]:
        return read_snapshot(self.path)


def run(directory: Path, code: str, *libraries: str, options: tuple[str, ...] = ()) -> Run:
    """Run a program; skip the test if a library is not installed."""
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    (directory / "program.py").write_text(BEGIN + code)
    path = directory / "out.pickle"
    command = [sys.executable, "-P", "-m", "cudakit", "run", "--memory", "--snapshot", str(path)]
    done = subprocess.run(
        [*command, *options, "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "not recorded" not in done.stderr
    return Run(json.loads(done.stdout.splitlines()[-1]), path, done.stderr)


def reserved(snapshot: dict[str, Any], *pools: str) -> int:
    """Return the bytes of the segments of pools; without one, of all."""
    ids = [POOL_IDS[pool] for pool in pools]
    return sum(
        segment["total_size"]
        for segment in snapshot["segments"]
        if not ids or segment["segment_pool_id"] in ids
    )


def in_use(snapshot: dict[str, Any], pool: str) -> int:
    return sum(
        block["size"]
        for segment in snapshot["segments"]
        if segment["segment_pool_id"] == POOL_IDS[pool]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


def functions(snapshot: dict[str, Any], pool: str) -> set[str]:
    """Return the functions of the program in the call stacks of the blocks of a pool."""
    return {
        frame["name"]
        for segment in snapshot["segments"]
        if segment["segment_pool_id"] == POOL_IDS[pool]
        for block in segment["blocks"]
        for frame in block["frames"]
        if frame["filename"].endswith("program.py")
    }


CUPY = """
import cupy
cupy.cuda.Device(0).use()
cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1))  # creates the context
pool = cupy.get_default_memory_pool()
free_before, _ = cupy.cuda.runtime.memGetInfo()

def weights():
    return cupy.empty(8 << 20, "u1")

def temporary():
    return cupy.empty(32 << 20, "u1")

kept = [weights() for _ in range(3)]
temporary()
kept.append(cupy.empty(1000, "u1"))  # a part of the free block of temporary()
counters["used"], counters["total"] = pool.used_bytes(), pool.total_bytes()
counters["driver"] = free_before - cupy.cuda.runtime.memGetInfo()[0]
"""


def test_cupy_totals_equal_the_counters_of_pool_and_driver(tmp_path: Path) -> None:
    done = run(tmp_path, CUPY, "cupy")

    snapshot, counters = done.snapshot, done.counters
    assert in_use(snapshot, "cupy") == counters["used"]
    assert reserved(snapshot, "cupy") == counters["total"] == counters["driver"]
    assert "weights" in functions(snapshot, "cupy")
    (device,) = cudakit.memviz(done.path).devices
    assert device.end.reserved_bytes == reserved(snapshot)
    assert opened_by_all(done.snapshot, tmp_path)


def test_cupy_memory_of_other_threads_is_recorded(tmp_path: Path) -> None:
    code = """
import threading
def work():
    kept.append(cupy.empty(64 << 20, "u1"))
thread = threading.Thread(target=work)
thread.start(); thread.join()
counters["used"] = pool.used_bytes()
"""
    done = run(tmp_path, CUPY + code, "cupy")

    assert in_use(done.snapshot, "cupy") == done.counters["used"]
    assert "work" in functions(done.snapshot, "cupy")


NUMBA = """
from numba import cuda

def array():
    return cuda.device_array(16 << 20, "u1")

arrays = [array()]  # the driver takes memory of its own before the first one
context = cuda.current_context()
free_before = context.get_memory_info().free
arrays += [array(), array()]
dropped = array()
del dropped  # freed by Numba at a later time
counters["used"] = 3 * (16 << 20)
counters["driver"] = free_before - context.get_memory_info().free
"""


def test_numba_totals_equal_the_memory_info_of_its_context(tmp_path: Path) -> None:
    done = run(tmp_path, NUMBA, "numba")

    assert in_use(done.snapshot, "numba") == done.counters["used"]
    first = 16 * MIB
    assert reserved(done.snapshot, "numba") - first == done.counters["driver"]
    assert "array" in functions(done.snapshot, "numba")


JAX = """
import os
import jax, jax.numpy as jnp
device = jax.devices("gpu")[0]

def parameters():
    return jnp.zeros((4, 1 << 20), "float32") + 1

before = device.memory_stats()["bytes_in_use"]
params = [parameters() for _ in range(2)]
jax.block_until_ready(params)
counters["arrays"] = sum(array.nbytes for array in jax.live_arrays())
counters["used"] = device.memory_stats()["bytes_in_use"]
counters["pool"] = device.memory_stats().get("pool_bytes", 0)
"""


def test_jax_totals_equal_its_memory_stats(tmp_path: Path) -> None:
    done = run(tmp_path, JAX, "jax")

    snapshot, counters = done.snapshot, done.counters
    assert in_use(snapshot, "jax") >= counters["arrays"] == 2 * 16 * MIB
    # Its allocator rounds to 256 bytes, and counts scalars and temporary buffers.
    assert abs(in_use(snapshot, "jax") - counters["used"]) < MIB
    assert reserved(snapshot, "jax") >= counters["pool"]
    assert "parameters" in functions(snapshot, "jax")


TORCH = """
import torch
from torch.utils.checkpoint import checkpoint
torch.cuda.init()
torch.empty(1, device="cuda")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()

def step():
    model(torch.randn(512, 1024, device="cuda")).sum().backward()

step()
torch.cuda.synchronize()

def count_torch():
    stats = torch.cuda.memory_stats()
    counters["allocated"] = stats["allocated_bytes.all.current"]
    counters["reserved"] = stats["reserved_bytes.all.current"]
    counters["requested"] = stats["requested_bytes.all.current"]

count_torch()
"""


def torch_segments(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    own = set(POOL_IDS.values())
    return [each for each in snapshot["segments"] if each["segment_pool_id"] not in own]


def assert_torch_counters(done: Run) -> None:
    segments = torch_segments(done.snapshot)
    assert sum(each["total_size"] for each in segments) == done.counters["reserved"]
    assert sum(each["allocated_size"] for each in segments) == done.counters["allocated"]
    assert sum(each["requested_size"] for each in segments) == done.counters["requested"]


def test_torch_totals_equal_its_memory_stats(tmp_path: Path) -> None:
    done = run(tmp_path, TORCH, "torch")

    assert_torch_counters(done)
    (device,) = (each for each in cudakit.memviz(done.path).devices if each.device == 0)
    assert not any(astuple(device.health.contradictions))
    assert opened_by_all(done.snapshot, tmp_path)


def test_torch_allocations_of_backward_pass_name_its_caller(tmp_path: Path) -> None:
    snapshot = run(tmp_path, TORCH, "torch").snapshot

    allocs = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    without_stack = [entry for entry in allocs if not entry["frames"]]
    assert len(without_stack) <= 0.02 * len(allocs)
    backward = [each for each in allocs if each["frames"][0]["name"].startswith("backward pass")]
    assert backward
    assert all(any(frame["name"] == "step" for frame in each["frames"]) for each in backward)


def test_torch_and_cupy_in_one_program_have_separate_totals(tmp_path: Path) -> None:
    done = run(tmp_path, CUPY + TORCH + "\ntotals = torch.cuda.mem_get_info()\n", "torch", "cupy")

    assert_torch_counters(done)
    assert in_use(done.snapshot, "cupy") == done.counters["used"]
    assert reserved(done.snapshot, "cupy") == done.counters["total"]


def test_expandable_segments_of_torch_are_not_counted_twice(tmp_path: Path) -> None:
    setting = "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n"
    done = run(tmp_path, setting + TORCH, "torch")

    assert_torch_counters(done)
    ends = 0
    for segment in done.snapshot["segments"]:  # by address
        assert segment["address"] >= ends
        ends = segment["address"] + segment["total_size"]
    # cuBLAS allocates a work area for each thread with a handle: 64 MiB on Hopper.
    assert reserved(done.snapshot) - done.counters["reserved"] == reserved(done.snapshot, "driver")
    assert reserved(done.snapshot, "driver") < 256 * MIB


def test_pinned_memory_is_recorded(tmp_path: Path) -> None:
    code = "import torch\nkept = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)\n"
    done = run(tmp_path, code, "torch")

    assert sum(each["size"] for each in done.snapshot["host_segments"]) >= 16 * MIB


def test_limit_is_reported_with_the_line_that_passed_it(tmp_path: Path) -> None:
    done = run(tmp_path, CUPY, "cupy", options=("--limit", "40MiB"))

    assert "memory on cuda:0 passed the limit of 40.0 MiB" in done.stderr
    assert "in temporary; peak" in done.stderr


def test_failed_allocation_of_cupy_has_a_snapshot_of_its_moment(tmp_path: Path) -> None:
    code = """
pool.set_limit(128 << 20)
try:
    cupy.empty(256 << 20, "u1")
except cupy.cuda.memory.OutOfMemoryError:
    pass
"""
    run(tmp_path, CUPY + code, "cupy")

    (device,) = cudakit.memviz(tmp_path / "out-oom.pickle").devices
    (oom,) = device.ooms
    assert oom.size_bytes == 256 * MIB
    assert "cupy" in oom.sentence or oom.pool == POOL_IDS["cupy"]


BLOCK = """
import cudakit
from pathlib import Path

with cudakit.record_memory("block.pickle") as recording:
{body}
assert recording.notes == (), recording.notes
assert recording.files == [Path("block.pickle").absolute()]
"""


def test_block_records_cupy_and_torch_as_run_memory_does(tmp_path: Path) -> None:
    for library in ("torch", "cupy"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    body = "\n".join(f"    {line}" for line in (CUPY + TORCH).splitlines())
    (tmp_path / "program.py").write_text(BEGIN + BLOCK.format(body=body))
    done = subprocess.run(
        [sys.executable, "-P", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

    result = Run(json.loads(done.stdout.splitlines()[-1]), tmp_path / "block.pickle", done.stderr)
    assert_torch_counters(result)
    assert in_use(result.snapshot, "cupy") == result.counters["used"]
    assert reserved(result.snapshot, "cupy") == result.counters["total"]
    assert "step" in {
        frame["name"]
        for entry in result.snapshot["device_traces"][0]
        for frame in entry["frames"]
        if entry["action"] == "alloc"
    }
