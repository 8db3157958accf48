"""``run --memory`` with a fake CUDA, and with packages that have the hooks of CuPy and Numba."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from record.programs import supervised
from record.recorded import build_library

import cudakit
from cudakit.cli.run.memory import MemoryMonitor
from cudakit.memory.snapshot import POOL_IDS
from cudakit.memory.torch_snapshot import read_snapshot
from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.record.protocol import AgentMessage, Settings

pytest.importorskip("cudakit.record._frames", reason="the frame reader was not built")

STAND_IN = Path(__file__).parents[1] / "record" / "memory_stand_in" / "site-packages"
MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


@dataclass
class Run:
    """A program that was run with --memory."""

    stdout: str
    paths: list[str]
    limits_passed: list[str]
    notes: list[str] = field(default_factory=list)

    def snapshot(self, index: int = 0) -> dict[str, Any]:
        return read_snapshot(Path(self.paths[index]))


@dataclass
class Runner:
    """Runs programs in a directory."""

    library: Path
    directory: Path
    file: str = "out.pickle"

    def __call__(
        self, code: str, *, limit: int | None = None, driver: bool = True, **env: str
    ) -> Run:
        (self.directory / "program.py").write_text(code)
        notes: list[str] = []
        monitor = MemoryMonitor(
            self.directory / self.file, limit_bytes=limit, add_note=notes.append
        )
        paths = SearchPaths.of_this_process()

        def on_message(message: AgentMessage) -> None:
            if not monitor.on_message(message):
                notes.append(message.text)

        def on_batch(batch: Any) -> bool:
            monitor.on_batch(batch)
            return False

        done = supervised(
            ["program.py"],
            cwd=self.directory,
            settings=Settings(
                memory=self.directory / self.file,
                library=str(self.library) if driver else "",
                recorder=str(find_recorder(paths)),
                frames={tag: str(path) for tag, path in find_frame_readers(paths).items()},
            ),
            on_batch=on_batch,
            on_message=on_message,
            **{"PYTHONPATH": str(STAND_IN), "FAKE_CUDA": str(self.library), **env},
        )
        assert (done.status, done.stderr) == (0, "")
        return Run(done.stdout, *monitor.finish(), notes)


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Runner:
    return Runner(library, tmp_path)


def blocks(snapshot: dict[str, Any], pool: str) -> list[tuple[int, int, str]]:
    """List (size, requested size, function in the program) of the blocks in use of a pool."""
    return [
        (block["size"], block["requested_size"], function(block["frames"]))
        for segment in snapshot["segments"]
        if segment["segment_pool_id"] == POOL_IDS[pool]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def function(frames: list[dict[str, Any]]) -> str:
    """Return the innermost function of the program in a call stack."""
    return next((frame["name"] for frame in frames if frame["filename"].endswith("program.py")), "")


def reserved(snapshot: dict[str, Any], pool: str) -> int:
    pool_id = POOL_IDS[pool]
    return sum(s["total_size"] for s in snapshot["segments"] if s["segment_pool_id"] == pool_id)


CUPY = """
import cupy

def weights():
    return cupy.pool.malloc(1000)

def temporary():
    return cupy.pool.malloc(3 << 20)

kept = weights()
cupy.pool.free(temporary())
print(cupy.pool.used_bytes, cupy.pool.total_bytes)
"""


@pytest.mark.parametrize("driver", [True, False], ids=["recorder", "hooks-only"])
def test_cupy_pool_has_segments_blocks_and_call_stacks(run: Runner, driver: bool) -> None:
    done = run(CUPY, driver=driver)

    snapshot = done.snapshot()
    used, total = map(int, done.stdout.split())
    assert blocks(snapshot, "cupy") == [(1024, 1000, "weights")]
    assert (used, total) == (1024, reserved(snapshot, "cupy"))
    assert [entry["action"] for entry in snapshot["device_traces"][0]] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    assert done.notes == []


def test_memviz_reads_the_snapshot(run: Runner) -> None:
    result = cudakit.memviz(run(CUPY).paths[0])

    (device,) = result.devices
    assert device.end.requested_bytes == 1000
    assert device.end.reserved_bytes == 5 * MIB
    assert device.peak.requested_bytes == 1000 + 3 * MIB


def test_memory_of_threads_is_recorded(run: Runner) -> None:
    done = run(
        """
import threading
import cupy

def work():
    kept.append(cupy.pool.malloc(512))

kept = []
thread = threading.Thread(target=work)
thread.start(); thread.join()
"""
    )

    assert blocks(done.snapshot(), "cupy") == [(512, 512, "work")]


def test_freed_segments_are_not_reserved(run: Runner) -> None:
    done = run(CUPY + "cupy.pool.free(kept); cupy.pool.free_all_blocks()\n")

    assert done.snapshot()["segments"] == []
    assert cudakit.memviz(done.paths[0]).devices[0].peak.reserved_bytes == 5 * MIB


def test_memory_without_pool_belongs_to_the_driver(run: Runner) -> None:
    done = run(
        """
import fake_driver

def workspace():
    return fake_driver.malloc(4 << 20)

fake_driver.use_cuda()
workspace()
fake_driver.free(fake_driver.malloc(1 << 20))
fake_driver.malloc(3 << 20, "pinned")
"""
    )

    snapshot = done.snapshot()
    assert blocks(snapshot, "driver") == [(4 * MIB, 4 * MIB, "workspace")]
    assert [entry["action"] for entry in snapshot["device_traces"][0]] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
        "segment_free",
    ]  # fmt: skip
    (pinned,) = snapshot["host_segments"]
    assert (pinned["size"], function(pinned["frames"])) == (3 * MIB, "<module>")
    assert {device.device for device in cudakit.memviz(done.paths[0]).devices} == {0, None}


NUMBA = """
from numba.cuda.cudadrv import driver

def array():
    return driver.memalloc(1 << 20)

kept, dropped = array(), array()
del dropped
"""


def test_memory_that_numba_has_not_freed_yet_is_reserved_but_not_in_use(run: Runner) -> None:
    snapshot = run(NUMBA).snapshot()

    assert [size for size, _, _ in blocks(snapshot, "numba")] == [MIB]
    assert reserved(snapshot, "numba") == 2 * MIB
    assert reserved(run(NUMBA + "driver.clear()\n", RANK="1").snapshot(), "numba") == MIB


def test_several_libraries_in_one_program_have_separate_pools(run: Runner) -> None:
    snapshot = run(CUPY + NUMBA).snapshot()

    assert len(blocks(snapshot, "cupy")) == len(blocks(snapshot, "numba")) == 1
    assert blocks(snapshot, "driver") == []


def test_mapped_memory_of_numba_is_not_device_memory_of_its_pool(run: Runner) -> None:
    code = NUMBA + "mapped = driver.memalloc(512, driver.MappedMemory)\n"

    assert len(blocks(run(code).snapshot(), "numba")) == 1


def test_killed_program_has_a_snapshot_up_to_its_death(run: Runner) -> None:
    done = run(CUPY + "import os; sys_exit = os._exit(0)\n")

    assert blocks(done.snapshot(), "cupy") == [(1024, 1000, "weights")]


def test_child_processes_and_ranks_have_files_of_their_own(run: Runner) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CUPY!r}])\n{CUPY}"

    done = run(code)
    names = {Path(path).name for path in done.paths}
    assert "out.pickle" in names
    assert len(names) == 2
    assert all(name.startswith("out") for name in names)
    assert Path(run(CUPY, RANK="3").paths[0]).name == "out-rank003.pickle"


def test_frees_at_the_end_of_the_process_are_not_in_the_snapshot(run: Runner) -> None:
    code = (
        CUPY
        + "import atexit\nclass Last:\n    def __del__(self): cupy.pool.free(kept)\nlast = Last()\n"
    )

    assert len(blocks(run(code).snapshot(), "cupy")) == 1


def test_limit_names_the_allocation_that_passed_it(run: Runner) -> None:
    done = run(CUPY, limit=4 * MIB)

    (sentence,) = done.limits_passed
    assert (
        "memory on cuda:0 passed the limit of 4.00 MiB: 5.00 MiB after cupy allocated" in sentence
    )
    assert "3.00 MiB at " in sentence
    assert sentence.endswith("program.py:8 in temporary; peak 5.00 MiB")
    assert run(CUPY, limit=5 * MIB).limits_passed == []


def test_damaged_jax_profile_is_reported(run: Runner) -> None:
    code = "import os, glob\n"
    code += "spool = __import__('json').loads(os.environ['CUDAKIT_AGENT'])['spool']\n"
    code += f"open(f'{{spool}}/{{os.getpid()}}.jax', 'w').write({json.dumps('{}')!r} + chr(10))\n"

    assert "JAX cannot be read" in run(CUPY + code).notes[0]


NVTX = f"""{CUPY}
import nvtx
with nvtx.annotate("step 7"), nvtx.annotate("backward", domain="mine"):
    kept = cupy.pool.malloc(8 << 20)
nvtx.push_range("cub::DeviceScan", domain="CCCL")
nvtx.pop_range(domain="CCCL")
nvtx.mark("library call", domain="NCCL")
nvtx.mark("warm-up ended")
epoch = nvtx.start_range("epoch")
small = weights()
nvtx.mark("after the peak")
nvtx.end_range(epoch)
"""


def test_nvtx_ranges_and_marks_are_recorded_and_name_the_peak(run: Runner) -> None:
    recorded = run(NVTX)
    snapshot = recorded.snapshot()
    entries = [(each["name"], each["stage"]) for each in snapshot["external_annotations"]]
    device = cudakit.memviz(recorded.paths[0]).devices[0]

    assert entries == [
        ("step 7", "START"), ("backward", "START"), ("backward", "END"), ("step 7", "END"),
        ("epoch", "START"), ("epoch", "END"),
    ]  # fmt: skip
    assert device.peak.ranges == ("epoch",)
    assert [each["name"] for each in snapshot["cudakit_marks"]] == [
        "warm-up ended",
        "after the peak",
    ]
    assert device.peak.last_mark == "warm-up ended"
    assert recorded.notes == []


def test_injection_library_of_user_is_kept_and_reported(run: Runner) -> None:
    recorded = run(CUPY, NVTX_INJECTION64_PATH="/opt/tool.so")

    (note,) = recorded.notes
    assert note == "NVTX ranges are not recorded: NVTX_INJECTION64_PATH is /opt/tool.so"


RMM = """
import rmm

def table():
    return rmm.DeviceBuffer(1000)

def use():
    global kept
    kept = [table(), table()]
    del kept[1]

"""


def test_pool_of_rmm_is_recorded_and_shown_to_the_program_as_its_own(run: Runner) -> None:
    done = run(
        RMM
        + """
pool = rmm.mr.PoolMemoryResource()
rmm.mr.set_current_device_resource(pool)
assert rmm.mr.get_current_device_resource() is pool
assert rmm.mr.get_per_device_resource(0) is pool
use()
"""
    )

    assert blocks(done.snapshot(), "rmm") == [(1024, 1000, "table")]
    assert reserved(done.snapshot(), "rmm") == 8 * MIB
    assert done.notes == []


def test_pool_of_rmm_is_recorded_after_it_was_initialized_again(run: Runner) -> None:
    done = run(RMM + "rmm.reinitialize(pool_allocator=True)\nuse()\n")

    assert blocks(done.snapshot(), "rmm") == [(1024, 1000, "table")]


def test_default_resource_of_rmm_is_memory_of_the_driver(run: Runner) -> None:
    assert blocks(run(RMM + "use()\n").snapshot(), "driver") == [(1024, 1000, "table")]


TORCH = """
import sys, types
def snapshot():
    segment = {"device": 0, "address": 1 << 40, "total_size": 6 << 20, "blocks": []}
    return {"segments": [segment], "device_traces": [[]]}
memory = types.SimpleNamespace(_record_memory_history=lambda **_: None, _snapshot=snapshot)
cuda = types.SimpleNamespace(
    memory=memory, _lazy_call=lambda call: call(), device_count=lambda: 0
)
_C = types.SimpleNamespace(_cuda_attach_out_of_memory_observer=lambda observer: None)
"""


def test_limit_includes_memory_that_only_pytorch_has_recorded(run: Runner) -> None:
    (run.directory / "torch.py").write_text(TORCH)

    done = run("import torch\n", limit=5 * MIB, driver=False)
    (sentence,) = done.limits_passed
    assert "passed the limit of 5.00 MiB before the recorded events; peak 6.00 MiB" in sentence
    assert run("import torch\n", limit=6 * MIB, driver=False, RANK="1").limits_passed == []


@pytest.mark.parametrize(
    ("file", "oom_file"), [("out.pickle", "out-oom.pickle"), ("out.pkl.gz", "out-oom.pkl.gz")]
)
def test_failed_allocation_of_cupy_has_a_snapshot_of_its_moment(
    run: Runner, file: str, oom_file: str
) -> None:
    run.file = file
    done = run(
        CUPY
        + """
for _ in range(2):
    try:
        cupy.pool.malloc(2 << 30)
    except MemoryError:
        later = cupy.pool.malloc(512)
"""
    )

    assert [Path(path).name for path in done.paths] == [oom_file, file]
    assert blocks(done.snapshot(), "cupy") == [(1024, 1000, "weights")]
    (device,) = cudakit.memviz(done.paths[0]).devices
    (oom,) = device.ooms
    assert (oom.size_bytes, oom.device_free_bytes) == (2 << 30, 5 * MIB)
    trace = read_snapshot(Path(done.paths[0]))["device_traces"][0]
    assert trace[-1]["action"] == "oom"
    assert trace[-1]["frames"][0]["filename"].endswith("cupy/__init__.py")
    assert len(cudakit.memviz(done.paths[1]).devices[0].ooms) == 2
