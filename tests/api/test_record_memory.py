from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from record.recorded import build_library

import cudakit
from cudakit.memory.torch_snapshot import read_snapshot


class Torch(SimpleNamespace):
    """As much of torch as a snapshot needs."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.observers: list[Callable[..., None]] = []
        memory = SimpleNamespace(
            _record_memory_history=lambda enabled="all", **_: self.asked.append(enabled),
            _snapshot=lambda: {"segments": [], "calls": len(self.asked)},
            get_per_process_memory_fraction=lambda device: 0.5 + device / 4,
        )
        self.cuda = SimpleNamespace(
            memory=memory,
            device_count=lambda: 2,
            get_device_properties=lambda device: SimpleNamespace(total_memory=100 + device),
        )
        self._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=self.observers.append)

    def run_out_of_memory(self) -> None:
        for observer in self.observers:
            observer(0, 1, 2, 3)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.chdir(tmp_path)
    return made


def files() -> set[str]:
    return {place.name for place in Path().iterdir()}


def test_a_block_is_recorded_and_saved_at_its_end(torch: Torch) -> None:
    with cudakit.record_memory("step.pickle"):
        assert torch.asked == ["all"]
        assert files() == set()

    assert files() == {"step.pickle"}
    assert torch.asked == ["all", None]


def test_a_block_that_fails_is_saved_as_well(torch: Torch) -> None:
    with pytest.raises(KeyError), cudakit.record_memory():
        raise KeyError

    assert files() == {"cudakit-memory.pickle"}
    assert torch.asked[-1] is None


def test_the_first_time_that_memory_runs_out_is_saved(torch: Torch) -> None:
    with cudakit.record_memory("step.pickle"):
        torch.run_out_of_memory()
        Path("step-oom.pickle").write_text("the first")
        torch.run_out_of_memory()

    assert files() == {"step.pickle", "step-oom.pickle"}
    assert Path("step-oom.pickle").read_text() == "the first"


def test_snapshot_with_suffix_gz_is_compressed(torch: Torch) -> None:
    with cudakit.record_memory("step.v1.pkl.gz"):
        torch.run_out_of_memory()

    assert files() == {"step.v1.pkl.gz", "step.v1-oom.pkl.gz"}
    for name in files():
        assert Path(name).read_bytes().startswith(b"\x1f\x8b")
        assert read_snapshot(Path(name))["segments"] == []


def test_events_after_block_are_not_saved(torch: Torch) -> None:
    with cudakit.record_memory("step.pickle"):
        pass
    torch.run_out_of_memory()

    assert files() == {"step.pickle"}


def test_a_function_can_be_recorded_at_each_call(torch: Torch) -> None:
    @cudakit.record_memory("step.pickle")
    def step() -> int:
        return 1

    assert torch.asked == []
    assert step() + step() == 2
    assert torch.asked == ["all", None, "all", None]


def test_without_torch_other_memory_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "x.pickle"

    with cudakit.record_memory(path) as recording:
        pass

    assert recording.files == [recording.path] == [path]
    assert read_snapshot(path)["segments"] == []


STAND_IN = Path(__file__).parents[1] / "record" / "memory_stand_in" / "site-packages"
PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
import cudakit
from cudakit.memory.torch_snapshot import read_snapshot
from cudakit.memory.torch_snapshot import read_snapshot

def sizes(snapshot):
    return [[block["requested_size"] for block in segment["blocks"] if block["requested_size"]]
            for segment in snapshot["segments"]]

with cudakit.record_memory("first.pickle") as recording, cudakit.range("earlier"):
    import cupy
    first = cupy.pool.malloc(1000)
second = cupy.pool.malloc(2000)
with cudakit.range("epoch"), cudakit.record_memory("second.pickle"):
    cupy.pool.free(first)
    with cudakit.range("load"):
        third = cupy.pool.malloc(3000)
print(recording.notes, file=sys.stderr)
first, second = (read_snapshot(recording.path.with_name(f"{name}.pickle")) for name in ("first", "second"))
assert sizes(first) == [[1000]], first
assert sizes(second) == [[2000, 3000]], second
actions = [entry["action"] for entry in second["device_traces"][0]]
assert actions == ["free_requested", "free_completed", "alloc"], actions
ranges = [(each["name"], each["stage"]) for each in second["external_annotations"]]
assert ranges == [("epoch", "START"), ("load", "START"), ("load", "END")], ranges
"""


def test_blocks_record_pools_of_other_libraries(tmp_path: Path) -> None:
    library = build_library(tmp_path)
    completed = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", PROGRAM, str(STAND_IN)],
        cwd=tmp_path,
        env=os.environ | {"FAKE_CUDA": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr
    assert completed.stderr == "()\n"


def test_snapshot_has_the_memory_and_the_limit_of_each_device(torch: Torch) -> None:  # noqa: ARG001
    with cudakit.record_memory("step.pickle"):
        pass

    snapshot = pickle.loads(Path("step.pickle").read_bytes())  # noqa: S301
    settings = snapshot["allocator_settings"]
    assert settings == {"device_total_bytes": [100, 101], "memory_fraction": [0.5, 0.75]}
