"""Runs programs on a fake CUDA, and returns the events that the recorder wrote."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest

from cudakit.trace.events import Event
from cudakit.trace.spool import Spool
from cudakit.trace.trace_file import unpack

HERE = Path(__file__).parent
CAPTURE = HERE.parents[1] / "cudakit/record"
# Linked into the device patch on the host.
SOURCES = ("containers.c", "decode/pages.c", "decode/tma_boxes.c", "decode/tensor_maps.c")

Patches: TypeAlias = tuple[tuple[int, bytes], ...]  # files of device patches, by compute capability

# Prologue of every program. CUDA handles are addresses: any distinct numbers.
BEGIN = """
import ctypes, importlib, os, sys
spool, library = sys.argv[1:]
recorder = importlib.import_module("cudakit.record._recorder")
cuda = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
P, U = ctypes.c_void_p, ctypes.c_uint64
CONTEXT, LEGACY, STREAM, OTHER = P(0x1000), P(0x1001), P(0x2000), P(0x3000)
ALLOC, FREE, HOST_ALLOC, ALLOC_ASYNC, FREE_ASYNC = 11, 12, 13, 15, 16
CREATED, DESTROYED, RECORD, WAIT, SYNCHRONIZE = 1, 2, 3, 4, 5

class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("parameters", ctypes.c_size_t),
                ("offsets", ctypes.c_size_t * 8), ("sizes", ctypes.c_size_t * 8)]

def memory(kind, address, size, stream=None, flags=0, context=CONTEXT):
    cuda.memory(kind, context, stream, U(address), U(size), flags)

def pointers(*values):
    held = [U(value) for value in values]
    array = (P * len(held))(*(ctypes.addressof(each) for each in held))
    array.held = held
    return array

recorder.start(spool, library, 0, PATCHES, templates=TEMPLATES)
assert "again" in os.environ or not os.listdir(spool), "nothing is written before CUDA is used"
cuda.make_context(CONTEXT, 3)
cuda.make_stream(CONTEXT, STREAM, 1)
"""


def recorded(
    directory: Path,
    library: Path,
    program: str,
    *,
    status: int = 0,
    patches: Patches = (),
    templates: bool = False,
) -> list[Event]:
    """Run a program, and return the events of its process in order."""
    processes = recorded_processes(
        directory, library, program, status=status, patches=patches, templates=templates
    )
    assert len(processes) <= 1
    return processes[0] if processes else []


def recorded_processes(
    directory: Path,
    library: Path,
    program: str,
    *,
    status: int = 0,
    patches: Patches = (),
    templates: bool = False,
) -> list[list[Event]]:
    """Run a program that may fork, and return the events of each process."""
    run_program(directory, library, program, status=status, patches=patches, templates=templates)
    events: dict[int, list[Event]] = {}
    for batch in Spool(directory).batches():
        events.setdefault(batch.process, []).extend(unpack(batch.records, batch.strings))
    return list(events.values())


def run_program(
    directory: Path,
    library: Path,
    program: str,
    *,
    status: int = 0,
    patches: Patches = (),
    templates: bool = False,
) -> None:
    """Run a program, which writes its traces to the directory."""
    result = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"PATCHES, TEMPLATES = {patches}, {templates}" + BEGIN + program,
            str(directory),
            str(library),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    # AddressSanitizer warns about makecontext, with which the patch on the host simulates warps.
    stderr = [line for line in result.stderr.splitlines() if "swapcontext" not in line]
    assert not stderr, result.stderr
    assert result.returncode == status


def build_library(directory: Path) -> Path:
    """Build the fake CUDA; skip the test without a compiler or the recorder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    if not find_spec("cudakit.record._recorder"):
        pytest.skip("the recorder was not built")
    library = directory / "libfake_cuda.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror",
         "-Wno-unknown-pragmas", *shlex.split(os.environ.get("CFLAGS", "")), "-Wl,-soname,libcuda.so.1",
         f"-I{CAPTURE}", f"-I{CAPTURE / 'native/recorder'}", f"-I{CAPTURE / 'patch'}",
         *(str(HERE / name) for name in ("fake_cuda.c", "fake_device.c", "patch_on_host.c")),
         *(str(CAPTURE / "native/recorder" / name) for name in SOURCES), "-lpthread", "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


def event_bodies(events: list[Event], kind: type) -> Iterator[object]:
    """Yield the bodies of the events of one kind."""
    return (event.body for event in events if isinstance(event.body, kind))
