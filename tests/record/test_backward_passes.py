"""Tests that work of autograd's threads gets the call stack of the backward call.

CUDA and torch are replaced by fakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from record.programs import RECORDING, supervised
from record.recorded import build_library

from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.stacks import BACKWARD_FRAME
from cudakit.trace.kinds import EventKind
from cudakit.trace.spool import Batch

pytest.importorskip("cudakit.record._frames", reason="the frame reader was not built")

STAND_IN = Path(__file__).parent / "stand_in"

# ``launch`` launches a kernel on a thread without Python frames, by default on a thread of autograd.
FAKE_GPU = f"""
import ctypes, os, sys, threading
import torch

class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("parameters", ctypes.c_size_t),
                ("offsets", ctypes.c_size_t * 8), ("sizes", ctypes.c_size_t * 8)]

BACKWARD = {BACKWARD_FRAME!r}
backward = torch.autograd.backward
cuda, kernel = ctypes.CDLL(library), Kernel(b"add", 0)
context, stream = ctypes.c_void_p(0x1000), ctypes.c_void_p(0x2000)

def use_cuda():
    cuda.make_context(context, 0)
    cuda.make_stream(context, stream, 1)

def launch(thread=b"pt_autograd_0"):
    cuda.launch_on_thread(thread, context, stream, ctypes.byref(kernel))

use_cuda()
"""
BEGIN = """
import sys
from pathlib import Path
from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.record.preflight import RecorderFiles
from cudakit.record.recording import begin
from cudakit.trace.kinds import EventKind

library, places, batches = sys.argv[1], SearchPaths.of_this_process(), []
ready = RecorderFiles(Path(library), find_recorder(places), find_frame_readers(places))
recording = begin(batches.append, files_or_refusal=ready)

def stacks(process=None):
    with recording.drain():
        return [
            [frame.name for frame in batch.stacks[site]]
            for batch in batches if batch.process == (process or os.getpid())
            for kind, site in zip(batch.records["kind"].tolist(), batch.records["site"].tolist())
            if kind == EventKind.LAUNCH
        ]
"""


# ``ranges_of_launches`` lists for each launch the names of the open NVTX ranges, innermost first.
RANGES = """
import nvtx
from cudakit.trace.names import RangeTracker

def ranges_of_launches():
    tracker, names = RangeTracker(), []
    with recording.drain():
        for batch in batches:
            innermost = tracker.follow(batch.records)
            for kind, open_range in zip(batch.records["kind"], innermost if innermost is not None else ()):
                if kind == EventKind.LAUNCH:
                    names.append([batch.strings[each.name] for each in open_range or ()])
    return names
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


def run(library: Path, code: str, *, setup_code: str = "") -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(STAND_IN)!r})\n{setup_code}{BEGIN}{FAKE_GPU}{code}"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program, str(library)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "setup_code", ["", "import torch\n"], ids=["imported-later", "imported-before"]
)
def test_work_of_autograd_thread_has_stack_of_backward_call(library: Path, setup_code: str) -> None:
    run(
        library,
        """
def step():
    return backward(launch)

step(), step()
assert stacks() == [[BACKWARD, "backward", "step", "<module>"]] * 2, stacks()
with recording.drain():
    first, again = (frame for frame in batches[-1].stacks[1:] if frame[0].name == BACKWARD)
    assert (first[0].filename, first[0].line) == ("", 0)
    callers = {(stack[2].filename, stack[2].line) for stack in (first, again)}
    assert callers == {("<string>", step.__code__.co_firstlineno + 1)}
""",
        setup_code=setup_code,
    )


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python numbers program calls from 3.12 on")
def test_work_of_autograd_thread_belongs_to_the_backward_call(library: Path) -> None:
    run(
        library,
        """
def twice():
    launch(), launch()

backward(twice), backward(launch)
launch()
with recording.drain():
    numbers = [
        number
        for batch in batches
        for kind, number in zip(batch.records["kind"].tolist(), batch.records["program_call"].tolist())
        if kind == EventKind.LAUNCH
    ]
first, second, other, outside = numbers
assert 0 < first == second != other > 0, numbers
assert outside == 0, numbers
""",
    )


def test_work_outside_of_backward_passes_has_no_stack(library: Path) -> None:
    run(library, "launch(); backward(lambda: None); launch(); assert stacks() == [[], []]")


@pytest.mark.parametrize("name", ["pt_nccl_watchdg", "python", "pt_autograd"])
def test_work_of_other_threads_has_no_stack(library: Path, name: str) -> None:
    run(library, f"backward(lambda: launch({name.encode()})); assert stacks() == [[]]")


def test_work_of_thread_with_frames_keeps_its_own_stack(library: Path) -> None:
    run(
        library,
        """
def custom_function():
    cuda.launch(context, stream, ctypes.byref(kernel), None, None)

def on_other_thread():
    thread = threading.Thread(target=custom_function)
    thread.start(), thread.join()

backward(custom_function), backward(on_other_thread)
direct, threaded = stacks()
assert direct == ["custom_function", "_engine_run_backward", "backward", "<module>"], direct
assert threaded[0] == "custom_function" and BACKWARD not in threaded and "backward" not in threaded
""",
    )


def test_work_during_two_backward_passes_has_no_stack(library: Path) -> None:
    run(
        library,
        """
began, done = threading.Event(), threading.Event()

def wait():
    began.set()
    done.wait()

def other_thread():
    backward(wait)

def step():
    thread = threading.Thread(target=other_thread)
    thread.start()
    began.wait()
    launch()
    done.set()
    thread.join()
    launch()

backward(step)
assert stacks() == [[], [BACKWARD, "backward", "<module>"]], stacks()
""",
    )


def test_concurrent_backward_passes_never_get_the_stack_of_each_other(library: Path) -> None:
    run(
        library,
        """
sys.setswitchinterval(1e-5)
kernels = Kernel(b"left", 0), Kernel(b"right", 0)

def work(kernel):
    cuda.launch_on_thread(b"pt_autograd_0", context, stream, ctypes.byref(kernel))

def left():
    for _ in range(300):
        backward(lambda: work(kernels[0]))

def right():
    for _ in range(300):
        backward(lambda: work(kernels[1]))

threads = [threading.Thread(target=each) for each in (left, right)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = set()
with recording.drain():
    for batch in batches:
        launches = view(batch.records[batch.records["kind"] == EventKind.LAUNCH], EventKind.LAUNCH)
        for name, site in zip(launches["name"].tolist(), launches["site"].tolist()):
            callers = {frame.name for frame in batch.stacks[site]} & {"left", "right"}
            found.add((batch.strings[name], *callers))
assert found <= {("left",), ("right",), ("left", "left"), ("right", "right")}, found
""",
        setup_code="from cudakit.trace.trace_file import view\n",
    )


def test_work_of_autograd_thread_is_in_ranges_of_backward_call(library: Path) -> None:
    run(
        library,
        RANGES
        + """
from cudakit.trace.trace_file import unpack

def backward_work():
    launch(), nvtx.push_range("inner"), nvtx.pop_range(), launch(b"other_thread")

with nvtx.annotate("step 1"), nvtx.annotate("backward", domain="mine"):
    backward(backward_work)
launch()
names = ranges_of_launches()
assert names == [["backward", "step 1"], [], []], names
events = []
for batch in batches:
    events += unpack(batch.records, batch.strings)
pushed, popped = (
    sum(event.body.kind == kind and event.thread != os.getpid() for event in events)
    for kind in (EventKind.RANGE_PUSH, EventKind.RANGE_POP)
)
assert pushed == popped == 2, (pushed, popped)
""",
    )


def test_work_during_two_backward_passes_is_in_no_range(library: Path) -> None:
    run(
        library,
        RANGES
        + """
began, done = threading.Event(), threading.Event()

def wait():
    began.set()
    done.wait()

def step():
    thread = threading.Thread(target=lambda: backward(wait))
    thread.start()
    began.wait()
    launch()
    done.set()
    thread.join()
    launch()

with nvtx.annotate("step"):
    backward(step)
names = ranges_of_launches()
assert names == [[], ["step"]], names
""",
    )


def test_backward_pass_that_began_first_may_end_first(library: Path) -> None:
    run(
        library,
        """
began, done = threading.Event(), threading.Event()

def wait():
    began.set()
    done.wait()

first = threading.Thread(target=backward, args=(wait,))
first.start()
began.wait()

def step():
    done.set()
    first.join()
    launch()

backward(step)
assert stacks() == [[BACKWARD, "backward", "<module>"]], stacks()
""",
    )


def test_nested_backward_pass_belongs_to_the_outer_one(library: Path) -> None:
    run(
        library,
        """
def inner():
    launch()
    backward(launch)
    launch()

def on_worker():
    thread = threading.Thread(target=torch._C.work_for, args=(7, inner))
    thread.start(), thread.join()

def outer(work):
    backward(work)

outer(inner), outer(on_worker)
assert stacks() == [[BACKWARD, "backward", "outer", "<module>"]] * 6, stacks()
""",
    )


def test_backward_pass_that_fails_ends(library: Path) -> None:
    run(
        library,
        """
try:
    backward(launch, fails=True)
except ValueError as error:
    assert str(error) == "the backward pass failed"
else:
    raise AssertionError("nothing was raised")
launch()
backward(launch)
assert [bool(stack) for stack in stacks()] == [True, False, True]
""",
    )


def test_forked_child_has_no_backward_pass_of_its_parent(library: Path) -> None:
    run(
        library,
        """
def fork():
    global child
    child = os.fork()
    if not child:
        use_cuda()
        launch()
    return child

pid = backward(fork)
if not pid:
    launch()
    backward(launch)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
backward(launch)
own = [BACKWARD, "backward", "<module>"]
assert stacks(pid) == [[], [], own], stacks(pid)
assert stacks() == [own], stacks()
""",
    )


def test_wrapped_function_passes_arguments_and_result(library: Path) -> None:
    run(
        library,
        """
from torch.autograd import graph
assert graph._engine_run_backward is torch.autograd._engine_run_backward
assert graph._engine_run_backward.__name__ == "_engine_run_backward"
assert backward(lambda: 17) == 17
try:
    graph._engine_run_backward()
except TypeError as error:
    assert "work" in str(error)
else:
    raise AssertionError("nothing was raised")
""",
    )


def test_failing_task_query_of_torch_is_not_raised(library: Path) -> None:
    run(
        library,
        """
backward(launch)
assert [stack[0] for stack in stacks()] == [BACKWARD]
""",
        setup_code='import torch\ndef fail(): raise RuntimeError("no task")\n'
        "torch._C._current_graph_task_id = fail\n",
    )


def test_torch_without_the_function_stays_unchanged(library: Path) -> None:
    run(
        library,
        "assert not hasattr(torch.autograd.graph, '_engine_run_backward'); launch()",
        setup_code="import torch\ndel torch.autograd.graph._engine_run_backward\n",
    )


def test_import_hooks_of_two_recordings_both_act() -> None:
    program = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path.insert(0, {str(STAND_IN)!r})
done = []
import cudakit.record.agent.torch_import as first
spec = spec_from_file_location("second", first.__file__)
second = module_from_spec(spec)
spec.loader.exec_module(second)
finders_before = list(sys.meta_path)
first.after_import("torch", lambda: done.append(1))
second.after_import("torch", lambda: done.append(2))
first.after_import("torch", lambda: done.append(3))
import torch
assert sorted(done) == [1, 2, 3], done
assert sys.meta_path == finders_before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def launch_stacks(batches: list[Batch]) -> Iterator[list[str]]:
    for batch in batches:
        for kind, site in zip(batch.records["kind"], batch.records["site"], strict=True):
            if kind == EventKind.LAUNCH:
                yield [frame.name for frame in batch.stacks[int(site)]]


def test_agent_attributes_work_of_autograd_threads(library: Path, tmp_path: Path) -> None:
    search_paths, batches = SearchPaths.of_this_process(), list[Batch]()
    settings = replace(
        RECORDING,
        library=str(library),
        recorder=str(find_recorder(search_paths)),
        frames={tag: str(path) for tag, path in find_frame_readers(search_paths).items()},
    )

    def on_batch(batch: Batch) -> bool:
        batches.append(batch)
        return False

    program = f"library = {str(library)!r}\n{FAKE_GPU}\nbackward(launch)\nlaunch()\n"
    (tmp_path / "train.py").write_text(program)
    notices: list[object] = []
    result = supervised(
        ["train.py"],
        cwd=tmp_path,
        settings=settings,
        on_batch=on_batch,
        on_message=notices.append,
        PYTHONPATH=str(STAND_IN),
    )

    assert (result.status, result.stderr, notices) == (0, "", [])
    assert list(launch_stacks(batches)) == [[BACKWARD_FRAME, "backward", "<module>"], []]
