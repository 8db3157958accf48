"""Tests ``cudakit run --profile`` with a fake CUPTI: the program makes the calls of the CUDA driver."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cudakit
from cudakit.cli.run.session import usable_files
from cudakit.record.installed import CUPTI_OVERRIDE
from cudakit.record.preflight import preflight

ROOT = Path(__file__).parents[2]
FAKE_CUPTI = ROOT / "tests/record/fake_cupti.c"
RECORDER = ROOT / "cudakit/record/native/recorder"

CUDAKIT_RUN = (sys.executable, "-P", "-m", "cudakit", "run")

# A program that uses the fake CUDA: ``launch`` launches kernels, each of 100 microseconds.
PROGRAM = """
import ctypes, os, struct, sys, time
cupti = ctypes.CDLL(os.environ["CUDAKIT_CUPTI_LIBRARY"])
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
names = {}

def use_cuda():
    path = libc.getenv(b"CUDA_INJECTION64_PATH")
    if path:
        ctypes.CDLL(path.decode()).InitializeInjection()
        cupti.set_record_bytes(10, ctypes.c_size_t(200))

def launch(name, correlation, deliver=cupti.deliver):
    cupti.call(1, 1, 0, correlation, 5, None)
    cupti.call(1, 1, 1, correlation, 5, None)
    buffer = names.setdefault(name, ctypes.create_string_buffer(name.encode()))
    start = time.monotonic_ns()
    record = bytearray(200)
    struct.pack_into("<i", record, 0, 10)
    struct.pack_into("<QQ", record, 16, start, start + 100_000)
    struct.pack_into("<III6i", record, 40, 0, 5, 7, 1, 1, 1, 32, 1, 1)
    struct.pack_into("<I", record, 92, correlation)
    struct.pack_into("<Q", record, 104, ctypes.addressof(buffer))
    if libc.getenv(b"CUDA_INJECTION64_PATH"):
        deliver(bytes(record), ctypes.c_size_t(len(record)))
"""


@pytest.fixture(scope="module")
def fake_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    if not find_spec("cudakit.record._recorder"):
        pytest.skip("the recorder was not built")
    library = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    command = [compiler, "-shared", "-fPIC", "-std=c11", "-O1", f"-I{RECORDER}", str(FAKE_CUPTI)]
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    subprocess.run([*command, *flags, "-lpthread", "-o", str(library)], check=True)
    return library


def profile(
    directory: Path, library: Path, program: str, *options: str, status: int = 0
) -> dict[str, Any]:
    """Run a program, and return the profile as JSON."""
    (directory / "program.py").write_text(PROGRAM + program, encoding="utf-8")
    result = subprocess.run(
        [*CUDAKIT_RUN, "--profile", "-q", "-o", "profile.json", *options, "program.py"],
        cwd=directory,
        env={**os.environ, CUPTI_OVERRIDE: str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stderr
    document: dict[str, Any] = json.loads((directory / "profile.json").read_text(encoding="utf-8"))
    return document


def kernel_calls(document: dict[str, Any]) -> dict[int, int]:
    """Return the number of kernels of each process."""
    calls: dict[int, int] = {}
    for device in document["devices"]:
        calls[device["process"]] = sum(kernel["calls"] for kernel in device["kernels"])
    return calls


def test_kernels_have_the_line_of_their_launch(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path, fake_cupti, "use_cuda()\nfor i in range(1, 11):\n    launch('gemm', i)\n"
    )
    (device,) = document["devices"]
    (kernel,) = device["kernels"]
    assert (kernel["name"], kernel["calls"]) == ("gemm", 10)
    assert "program.py" in json.dumps(kernel)


def test_program_that_never_uses_cuda_has_an_empty_profile(
    tmp_path: Path, fake_cupti: Path
) -> None:
    document = profile(tmp_path, fake_cupti, "print('no CUDA')\n", status=0)
    assert document["devices"] == []


def test_exit_status_of_the_program_is_kept(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path, fake_cupti, "use_cuda()\nlaunch('gemm', 1)\nsys.exit(3)\n", status=3
    )
    assert kernel_calls(document)
    assert document["exit_status"] == 3


def test_forked_worker_has_a_profile_of_its_own(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path,
        fake_cupti,
        """
import multiprocessing

def work():
    use_cuda()
    for i in range(1, 6):
        launch("in the worker", i)
    assert cupti.is_active()

worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
use_cuda()
launch("in the parent", 1)
""",
    )
    assert sorted(kernel_calls(document).values()) == [1, 5]


def test_children_are_not_profiled_without_follow(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path,
        fake_cupti,
        """
if not os.fork():
    use_cuda()
    launch("in the child", 1)
    os._exit(0)
os.wait()
use_cuda()
launch("in the parent", 1)
""",
        "--no-follow",
    )
    assert list(kernel_calls(document).values()) == [1]


def test_other_profiler_makes_the_profile_incomplete(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path, fake_cupti, "cupti.set_subscribe_result(39)\nuse_cuda()\n", status=1
    )
    (reason,) = document["incomplete"]
    assert reason.startswith("the process was not profiled: cuptiSubscribe")
    assert "another profiler" in reason


def test_public_functions_of_the_profiler_are_documented() -> None:
    assert "cudakit run --profile --paused" in (cudakit.profiler.__doc__ or "")


# A stand-in for torch: optimizers with hooks, and a profiler.
TORCH = {
    "__init__.py": "from torch import autograd, compiler, optim\n",
    "compiler.py": "compiling = False\ndef is_compiling():\n    return compiling\n",
    "optim/__init__.py": "from torch.optim import optimizer\n",
    "optim/optimizer.py": (
        "hooks = []\n"
        "def register_optimizer_step_post_hook(hook):\n"
        "    hooks.append(hook)\n"
        "def step():\n"
        "    for hook in hooks:\n"
        "        hook(None, (), {})\n"
    ),
    "autograd/__init__.py": "from torch.autograd import profiler\n",
    "autograd/profiler.py": (
        "def _enable_profiler(config):\n"
        "    return f'enabled {config}'\n"
        "def profile():\n"
        "    return _enable_profiler('CUDA')\n"
    ),
}


@pytest.fixture
def torch(tmp_path: Path) -> None:
    for name, content in TORCH.items():
        path = tmp_path / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.usefixtures("torch")
def test_steps_of_torch_optimizers_are_steps_of_the_profile(
    tmp_path: Path, fake_cupti: Path
) -> None:
    document = profile(
        tmp_path,
        fake_cupti,
        """
import torch
use_cuda()
for i in range(1, 9):
    launch("gemm", i)
    torch.optim.optimizer.step()
torch.compiler.compiling = True
torch.optim.optimizer.step()  # torch.compile traces the optimizer
""",
    )
    (device,) = document["devices"]
    assert "optimizer step" in json.dumps(device)


@pytest.mark.usefixtures("torch")
def test_use_of_torch_profiler_is_a_note(tmp_path: Path, fake_cupti: Path) -> None:
    document = profile(
        tmp_path,
        fake_cupti,
        """
import torch
use_cuda()
for i in range(1, 4):
    launch("gemm", i)
    assert torch.autograd.profiler.profile() == "enabled CUDA"
""",
    )
    (note,) = document["notes"]
    assert "torch.profiler" in note


def test_program_is_refused_without_cupti_on_a_machine_with_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUPTI_OVERRIDE, str(tmp_path / "missing.so"))
    notes: list[str] = []
    usable = partial(
        usable_files,
        preflight(None, profile=True),
        "the program was not profiled",
        add_note=notes.append,
    )
    with pytest.raises(cudakit.EnvironmentUnusable, match="is not a file"):
        usable(has_device=lambda: True, refuse=True)
    assert not notes

    assert not usable(has_device=lambda: True, refuse=False)
    assert "the program was not profiled" in notes.pop()

    assert not usable(has_device=lambda: False, refuse=True)
    assert not notes


def test_killed_program_keeps_work_that_ended_a_flush_interval_before(
    tmp_path: Path, fake_cupti: Path
) -> None:
    document = profile(
        tmp_path,
        fake_cupti,
        """
use_cuda()
for i in range(1, 6):
    launch("flushed", i, cupti.queue)
time.sleep(1)
os.kill(os.getpid(), 9)
""",
        status=-9,
    )
    assert list(kernel_calls(document).values()) == [5]


def test_killed_program_on_the_simulated_device_keeps_its_work(tmp_path: Path) -> None:
    example = (ROOT / "examples/profile/sim_steps.py").read_text(encoding="utf-8")
    killed = example.replace("gpu.close()", "import os; os.kill(os.getpid(), 9)")
    (tmp_path / "program.py").write_text(killed, encoding="utf-8")
    result = subprocess.run(
        [*CUDAKIT_RUN, "--profile", "-q", "-o", "profile.json", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -9, result.stderr
    (device,) = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["devices"]
    assert sum(kernel["calls"] for kernel in device["kernels"]) == 40
