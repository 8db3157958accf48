"""The agent in supervised programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from record.programs import RECORDING, Outcome, supervised

from cudakit.record.agent.start import parse
from cudakit.record.protocol import AGENT, AgentMessage, AgentMessageKind, Settings

# Stands in for the native recorder, and prints its calls.
STAND_IN = """
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
static PyObject *start(PyObject *self, PyObject *args) {
    const char *spool, *library; unsigned long long walker = 0;
    PyObject *patches = NULL;
    int memory_only = 0, templates = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "ss|KOpp", &spool, &library, &walker, &patches, &memory_only, &templates))
        return NULL;
    if (!*library) { PyErr_SetString(PyExc_RuntimeError, "no library\\nhere"); return NULL; }
    printf("start %s %llu\\n", library, walker);
    for (Py_ssize_t i = 0; patches && i < PyList_Size(patches); i++) {
        int capability; const char *image; Py_ssize_t bytes;
        PyObject *patch = PyList_GetItem(patches, i);
        if (!PyArg_ParseTuple(patch, "iy#", &capability, &image, &bytes)) return NULL;
        printf("patch %d %.*s\\n", capability, (int)bytes, image);
    }
    fflush(stdout);
    Py_RETURN_NONE;
}
static PyObject *stop(PyObject *self, PyObject *args) {
    (void)self; (void)args;
    printf("stop\\n"); fflush(stdout);
    Py_RETURN_NONE;
}
static PyObject *finish(PyObject *self, PyObject *args) {
    (void)self; (void)args;
    printf("finish\\n"); fflush(stdout);
    Py_RETURN_NONE;
}
static PyObject *watch_program_calls(PyObject *self, PyObject *args) {
    (void)self; (void)args;
    Py_RETURN_FALSE;
}
static PyMethodDef methods[] = {
    {"watch_program_calls", watch_program_calls, METH_VARARGS, 0},
    {"start", start, METH_VARARGS, 0}, {"stop", stop, METH_NOARGS, 0},
    {"finish", finish, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", 0, 0, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_NAME(void) {
    PyObject *made = PyModule_Create(&module);
    if (made) PyModule_AddIntConstant(made, "walker", 77);
    return made;
}
"""


def built(directory: Path, name: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    headers = Path(sysconfig.get_path("include"))
    if not compiler or not (headers / "Python.h").is_file():
        pytest.skip("needs a C compiler and the Python headers")
    source, module = directory / f"{name}.c", directory / f"{name}.abi3.so"
    source.write_text(STAND_IN.replace("NAME", name))
    command = [compiler, "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(module)]
    subprocess.run(command, check=True, capture_output=True)
    return str(module)


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("recorder"), "_recorder")


@pytest.fixture(scope="session")
def frames(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("frames"), "_frames")


def run(code: str, settings: Settings, cwd: Path) -> tuple[Outcome, list[AgentMessage]]:
    messages: list[AgentMessage] = []
    completed = supervised(["-c", code], cwd=cwd, settings=settings, on_message=messages.append)
    return completed, messages


def test_recorder_starts_before_the_program_and_outlives_atexit(
    tmp_path: Path, recorder: str, frames: str
) -> None:
    settings = replace(
        RECORDING,
        library="/lib/s.so",
        recorder=recorder,
        frames={str(sys.implementation.cache_tag): frames, "cpython-00": "/none"},
    )
    code = (
        "import atexit; atexit.register(print, 'at exit', flush=True); print('program', flush=True)"
    )

    completed, messages = run(code, settings, tmp_path)

    assert completed == Outcome(0, "start /lib/s.so 77\nprogram\nat exit\n", "")
    assert messages == []


def test_recorder_runs_without_a_frame_reader_for_this_python(
    tmp_path: Path, recorder: str
) -> None:
    settings = replace(
        RECORDING, library="/s.so", recorder=recorder, frames={"cpython-00": "/f.so"}
    )

    completed, messages = run("pass", settings, tmp_path)

    assert completed.stdout == "start /s.so 0\n"
    assert messages == []


def test_recorder_gets_the_patches_and_finishes_at_exit(tmp_path: Path, recorder: str) -> None:
    for number in ("80", "90"):
        (tmp_path / f"sm_{number}.cubin").write_bytes(b"of " + number.encode())
    patches = {number: str(tmp_path / f"sm_{number}.cubin") for number in ("80", "90")}
    settings = replace(RECORDING, library="/s.so", recorder=recorder, patches=patches)

    code = "import atexit; atexit.register(print, 'at exit', flush=True)"
    completed, messages = run(code, settings, tmp_path)

    started = "start /s.so 0\npatch 80 of 80\npatch 90 of 90\n"
    assert completed.stdout == f"{started}at exit\nfinish\n"
    assert messages == []


def test_recorder_finishes_in_forked_workers_of_multiprocessing(
    tmp_path: Path, recorder: str
) -> None:
    (tmp_path / "sm_90.cubin").write_bytes(b"of 90")
    settings = replace(
        RECORDING,
        library="/s.so",
        recorder=recorder,
        patches={"90": str(tmp_path / "sm_90.cubin")},
    )
    code = """
from multiprocessing import get_context
worker = get_context("fork").Process(target=print, args=("worker",), kwargs={"flush": True})
worker.start()
worker.join()
print("end", flush=True)
"""

    completed, messages = run(code, settings, tmp_path)

    assert completed.stdout.splitlines()[2:] == ["worker", "finish", "end", "finish"]
    assert messages == []


def test_frame_reader_that_cannot_be_loaded_is_reported(tmp_path: Path, recorder: str) -> None:
    frames = {str(sys.implementation.cache_tag): "/none/_frames.so"}
    settings = replace(RECORDING, library="/s.so", recorder=recorder, frames=frames)

    completed, (message,) = run("pass", settings, tmp_path)

    assert completed.stdout == "start /s.so 0\n"
    assert "/none/_frames.so" in message.text


def test_recorder_that_cannot_start_is_reported_and_the_program_runs(
    tmp_path: Path, recorder: str
) -> None:
    completed, (message,) = run("print(1)", replace(RECORDING, recorder=recorder), tmp_path)

    assert completed == Outcome(0, "1\n", "")
    assert message.kind is AgentMessageKind.UNRECORDED
    assert message.text == "RuntimeError: no library here"


def test_missing_recorder_is_reported_and_the_program_runs(tmp_path: Path) -> None:
    completed, (message,) = run(
        "print(1)", replace(RECORDING, recorder="/none/_recorder.so"), tmp_path
    )

    assert completed == Outcome(0, "1\n", "")
    assert "/none/_recorder.so" in message.text


def test_cuda_loaded_before_the_agent_is_reported(
    tmp_path: Path, recorder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preloaded = tmp_path / "libcuda.so.1"
    shutil.copy(recorder, preloaded)
    monkeypatch.setenv("LD_PRELOAD", str(preloaded))

    completed, messages = run(
        "print(1)", replace(RECORDING, library="/s.so", recorder=recorder), tmp_path
    )

    assert completed.stdout == "1\n"
    assert [message.text for message in messages] == [
        f"RuntimeError: CUDA was loaded before recording could start: {preloaded}"
    ]


def test_recorder_runs_in_child_processes(tmp_path: Path, recorder: str) -> None:
    settings = replace(RECORDING, library="/s.so", recorder=recorder)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(2)'])"

    followed, _ = run(code, settings, tmp_path)
    unfollowed, _ = run(code, replace(settings, follow=False), tmp_path)

    assert followed.stdout.count("start") == 2
    assert unfollowed.stdout == "start /s.so 0\n2\n"


def test_resource_tracker_of_multiprocessing_is_not_instrumented(
    tmp_path: Path, recorder: str
) -> None:
    code = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "m = SharedMemory(create=True, size=9); m.close(); m.unlink()"
    )

    completed, _ = run(code, replace(RECORDING, library="/s.so", recorder=recorder), tmp_path)

    assert completed.stdout.count("start") == 1


def test_unreadable_settings_do_not_harm_the_program() -> None:
    for text in ("", "{", "[]", '{"spool": 1}'):
        completed = subprocess.run(
            [sys.executable, "-c", "print(1)"],
            env={"PYTHONPATH": str(AGENT), "CUDAKIT_AGENT": text},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (completed.returncode, completed.stdout, completed.stderr) == (0, "1\n", "")


def test_settings_are_parsed_as_json() -> None:
    settings = {
        "spool": '/é "x"\n',
        "follow": True,
        "memory": None,
        "supervisor": 12,
        "frames": {"a": "b"},
    }

    assert parse(json.dumps(settings)) == settings


@pytest.mark.parametrize(
    "module", ["json", "re", "typing", "importlib", "atexit", "ctypes", "types"]
)
def test_agent_imports_no_module_the_program_may_replace(
    module: str,
) -> None:
    # The interpreter runs without site-packages, because .pth files may import any module.
    code = f"import sys; print('{module}' in sys.modules)"
    outcomes = []
    for environment in ({}, {"PYTHONPATH": str(AGENT), "CUDAKIT_AGENT": json.dumps(SETTINGS)}):
        python = str(Path(sys.base_prefix) / "bin" / Path(sys.executable).name)
        if not Path(python).exists():
            pytest.skip("needs a Python outside of this environment")
        completed = subprocess.run(
            [python, "-s", "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        outcomes.append(completed.stdout)

    assert outcomes[0] == outcomes[1]


SETTINGS = {
    "spool": "/none",
    "sanitize": False,
    "memory": None,
    "recorder": "",
    "library": "",
    "frames": {},
    "follow": True,
    "supervisor": 1,
}
