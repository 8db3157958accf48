"""Tests the plug for Numba on a real device.

Each test starts a process, because a process can set Numba's memory manager only once."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from arrays.plugs.viewers import opened_by_all
from numba_ready import WHY_NOT, numba_is_ready

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not numba_is_ready(), reason=WHY_NOT),
]

PROGRAM = """
import pickle, sys
import numpy as np
from numba import cuda

context = cuda.current_context()
allocator = context.memory_manager.allocator
allocator.record_history()

@cuda.jit
def add(total, numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        total[i] += numbers[i]

streams = [cuda.stream() for _ in range(3)]
totals = [cuda.to_device(np.zeros(1 << 18, "f4")) for _ in streams]
for turn in range(60):
    stream = streams[turn % 3]
    numbers = cuda.to_device(np.full(1 << 18, turn, "f4"), stream=stream)
    add[1024, 256, stream](totals[turn % 3], numbers)
    del numbers
cuda.synchronize()
for first, total in enumerate(totals):
    assert (total.copy_to_host() == sum(range(first, 60, 3))).all()
assert context.get_memory_info().total > 0
with open(sys.argv[1], "wb") as file:
    pickle.dump((allocator.statistics(), allocator.snapshot()), file)
"""


SHARING = """
import pickle, subprocess, sys
import numpy as np
from numba import cuda

numbers = cuda.to_device(np.arange(1000, dtype="f8"))
whole = numbers.get_ipc_handle()
part = numbers[10:20].get_ipc_handle()
cuda.synchronize()
done = subprocess.run(
    [sys.executable, "-P", "-c", sys.argv[1]],
    input=pickle.dumps((whole, part)), capture_output=True, timeout=100,
)
assert done.returncode == 0, done.stderr.decode()
print(done.stdout.decode().strip(), numbers.copy_to_host()[:3].tolist())
"""

OPENING = """
import pickle, sys
from numba import cuda

whole, part = pickle.load(sys.stdin.buffer)
with part as array:
    print(array.copy_to_host().tolist() == list(range(10, 20)))
with whole as array:
    print(array.copy_to_host().sum())
    array[0] = 5
    cuda.synchronize()
"""


def test_numba_array_is_opened_in_another_process() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", SHARING, OPENING],
        env=os.environ | {"NUMBA_CUDA_MEMORY_MANAGER": "cudakit.api.numba"},
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "499500.0", "[5.0,", "1.0,", "2.0]"]


def test_numba_on_several_streams_computes_correctly_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "seen.pickle"
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(path)],
        env=os.environ | {"NUMBA_CUDA_MEMORY_MANAGER": "cudakit.api.numba"},
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stderr
    statistics, snapshot = pickle.loads(path.read_bytes())  # noqa: S301  written by the program above
    assert statistics["allocation.all.allocated"] >= 63
    assert statistics["num_device_alloc"] < 30
    assert opened_by_all(snapshot, tmp_path).peak.requested_bytes >= 3 << 20
