"""Tests the recorder as an injection library of NVTX: it records ranges and marks of any library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from cudakit.trace.events import EventBody, Mark, RangePop, RangePush
from cudakit.trace.spool import Spool
from cudakit.trace.trace_file import unpack

pytestmark = pytest.mark.skipif(
    find_spec("cudakit.record._recorder") is None, reason="the recorder was not built"
)

CLIENT = Path(__file__).with_name("nvtx_client.c")
# Directories of NVTX's headers in toolkits and wheels.
TOOLKITS = Path("/usr/local").glob("cuda*/include")
WHEELS = chain(*(Path(path).glob("nvidia/*/include") for path in sys.path if path))
HEADERS = [path for path in chain(WHEELS, TOOLKITS) if (path / "nvtx3/nvToolsExt.h").exists()]

BEGIN = """
import importlib, os, sys, threading
recorder = importlib.import_module("cudakit.record._recorder")
assert recorder.start(sys.argv[1], "") is None
import nvtx
"""


def recorded(spool: Path, program: str, *arguments: str) -> list[list[EventBody]]:
    """Run a program, and return the bodies of each of its processes."""
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", BEGIN + program, str(spool), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return [list(bodies) for bodies in _by_process(spool).values()]


def _by_process(spool: Path) -> dict[int, Iterator[EventBody]]:
    bodies: dict[int, list[EventBody]] = {}
    with Spool(spool) as opened:
        for batch in opened.batches():
            new_bodies = [event.body for event in unpack(batch.records, batch.strings)]
            bodies.setdefault(batch.process, []).extend(new_bodies)
    return {process: iter(process_bodies) for process, process_bodies in bodies.items()}


def test_ranges_and_marks_of_nvtx_package_are_recorded(tmp_path: Path) -> None:
    program = """
nvtx.push_range("outer")
with nvtx.annotate("step 7", domain="mine"):
    nvtx.mark("Zeit: ½", domain="mine")
nvtx.pop_range()
epoch = nvtx.start_range("epoch", domain="mine")
thread = threading.Thread(target=lambda: nvtx.end_range(epoch))
thread.start(), thread.join()
"""
    assert recorded(tmp_path, program) == [
        [
            RangePush("outer"),
            RangePush("step 7", "mine"),
            Mark("Zeit: ½", "mine"),
            RangePop("mine"),
            RangePop(),
            RangePush("epoch", "mine", number=1),
            RangePop(number=1),
        ]
    ]


def test_ranges_of_cudakit_are_recorded(tmp_path: Path) -> None:
    program = """
import cudakit
with cudakit.range("load"):
    cudakit.mark("read")
"""
    assert recorded(tmp_path, program) == [
        [RangePush("load", "cudakit"), Mark("read", "cudakit"), RangePop("cudakit")]
    ]


def test_end_without_range_is_not_recorded(tmp_path: Path) -> None:
    program = """
nvtx.pop_range()
nvtx.push_range("one", domain="mine")
nvtx.pop_range()
nvtx.pop_range(domain="mine")
nvtx.pop_range(domain="mine")
"""
    assert recorded(tmp_path, program) == [[RangePush("one", "mine"), RangePop("mine")]]


def test_deeply_nested_ranges_are_all_recorded(tmp_path: Path) -> None:
    program = """
for number in range(100):
    nvtx.push_range(str(number))
for number in range(100):
    nvtx.pop_range()
"""
    (bodies,) = recorded(tmp_path, program)
    assert bodies == [RangePush(str(number)) for number in range(100)] + [RangePop()] * 100


def test_nothing_is_recorded_after_stop(tmp_path: Path) -> None:
    program = """
nvtx.push_range("recorded")
recorder.stop()
nvtx.push_range("not recorded")
nvtx.pop_range()
nvtx.mark("not recorded", domain="new")
"""
    assert recorded(tmp_path, program) == [[RangePush("recorded")]]


def test_process_that_is_not_recorded_has_no_ranges() -> None:
    start = 'assert recorder.start(sys.argv[1], "") is None'
    code = BEGIN.replace(start, 'os.environ["NVTX_INJECTION64_PATH"] = recorder.__file__')
    program = f"{code}assert type(nvtx.get_domain('x')) is not nvtx.Domain"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_library_of_user_is_not_replaced(tmp_path: Path) -> None:
    program = """
os.environ["NVTX_INJECTION64_PATH"] = "/opt/tool.so"
assert recorder.start(sys.argv[1], "") == "/opt/tool.so"
assert os.environ["NVTX_INJECTION64_PATH"] == "/opt/tool.so"
"""
    code = BEGIN.replace('assert recorder.start(sys.argv[1], "") is None\nimport nvtx\n', program)
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_fork_has_its_own_ranges(tmp_path: Path) -> None:
    program = """
nvtx.push_range("both")
child = os.fork()
nvtx.push_range("child" if child == 0 else "parent")
nvtx.push_range("both")
nvtx.pop_range(), nvtx.pop_range(), nvtx.pop_range()
if child == 0:
    recorder.stop()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    processes = sorted(recorded(tmp_path, program), key=len)
    ends = [RangePop()] * 2
    # The range that the parent opened is unknown in the child.
    assert processes == [
        [RangePush("child"), RangePush("both"), *ends],
        [RangePush("both"), RangePush("parent"), RangePush("both"), *ends, RangePop()],
    ]


def test_long_names_are_cut_between_characters(tmp_path: Path) -> None:
    program = """
nvtx.mark("x" + 600 * "é")
nvtx.mark("x" + 1023 * "y")
"""
    assert recorded(tmp_path, program) == [[Mark("x" + 511 * "é"), Mark("x" + 1023 * "y")]]


def test_number_of_recorded_range_names_is_bounded(tmp_path: Path) -> None:
    program = """
for number in range(65600):
    nvtx.mark(f"step {number}")
nvtx.mark("step 7")
"""
    (bodies,) = recorded(tmp_path, program)
    assert bodies[65535] == Mark("step 65535")
    assert set(bodies[65536:-1]) == {Mark("(range with one of too many names)")}
    assert bodies[-1] == Mark("step 7")


@pytest.mark.skipif(not (HEADERS and shutil.which("cc")), reason="needs NVTX's headers and cc")
def test_every_function_of_nvtx_is_recorded(tmp_path: Path) -> None:
    client, spool = tmp_path / "client.so", tmp_path / "spool"
    spool.mkdir()
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-I{HEADERS[0]}", CLIENT, "-ldl", "-o", client],  # noqa: S607
        check=True,
    )
    program = """
import ctypes
client = ctypes.CDLL(sys.argv[2])
assert client.call_all() == 0
assert client.call_all() == 0
"""
    ((*bodies,),) = recorded(spool, program, str(client))
    default = [
        Mark("ascii"), Mark("wide é漢😀"), Mark("event"),
        RangePush("ascii"), RangePush("wide é漢😀"), RangePush("wide event ½"), RangePush(""),
        RangePop(), RangePop(), RangePop(), RangePop(),
    ]  # fmt: skip
    in_domain = [
        Mark("registered", "domain"), RangePush("wide é漢😀", "wide domain"),
        RangePush("registered wide", "domain"), RangePop("domain"), RangePop("wide domain"),
    ]  # fmt: skip
    started = ("ascii", "wide é漢😀", "event")

    def numbered(first: int) -> list[EventBody]:
        begun = [RangePush(name, number=first + index) for index, name in enumerate(started)]
        begun.append(RangePush("event", "domain", number=first + 3))
        return [*begun, *(RangePop(number=first + index) for index in range(4))]

    assert bodies == [*default, *numbered(1), *in_domain, *default, *numbered(5), *in_domain]
