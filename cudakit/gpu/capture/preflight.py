"""Check that recording works, before the program starts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.capture.installed import (
    Library,
    SearchPaths,
    find_frame_readers,
    find_recorder,
    find_sanitizer_library,
)
from cudakit.gpu.capture.struct_layouts import Layout, check_structures

# The first driver with callbacks for events and waits (Sanitizer_CallbackIdEvents).
_OLDEST_DRIVER = 515
_DRIVER = "proc/driver/nvidia/version"
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+((\d+)\.[\d.]+)")

_OLDEST_PYTHON = (3, 11)
_TRIAL = Path(__file__).with_name("try_recorder.py")
_TRIAL_SECONDS = 30

# A process has one subscriber of the Sanitizer API, which excludes CUPTI.
_INJECTION = "CUDA_INJECTION64_PATH"
_LOADING = ("LD_PRELOAD", "NVTX_INJECTION64_PATH")
_TOOLS = re.compile(r"sanitizer|nsys|nsight|ncu\b|ToolsInjection|TreeLauncher|cupti", re.IGNORECASE)
_RUNNING_UNDER = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_TPS_LAUNCH_TOKEN": "Nsight Compute or Compute Sanitizer",
    "NV_SANITIZER_INJECTION_PORT_BASE": "Compute Sanitizer",
}


@dataclass(frozen=True, slots=True)
class Ready:
    """Recording works; the paths of what it uses."""

    library: Path  # libsanitizer-public.so
    version: tuple[int, ...]  # of the library; empty: unknown
    recorder: Path
    frames: Mapping[str, Path]  # readers of Python frames, by sys.implementation.cache_tag
    packages: Sequence[str] = ()  # search path of the program's interpreter, if not cudakit's
    patches: Mapping[int, Path] = field(default_factory=dict)  # by compute capability, such as 90

    def settings(self) -> dict[str, Any]:
        """Return the paths that are passed to the program in its environment, as JSON values."""
        return {
            "library": str(self.library),
            "recorder": str(self.recorder),
            "frames": {tag: str(path) for tag, path in self.frames.items()},
            "patches": {str(number): str(path) for number, path in self.patches.items()},
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the program cannot be recorded, and what to do about it."""

    message: str
    hint: str

    def error(self) -> EnvironmentUnusable:
        return EnvironmentUnusable(self.message, hint=self.hint)


def preflight(python: str | None, *, places: SearchPaths | None = None) -> Ready | Refusal:
    """Check whether programs of an interpreter can be recorded on this machine.

    ``python`` is the path of the interpreter, None for cudakit's own. ``places`` replaces the search paths.
    Does not load CUDA into this process: the recorder is tried in another one.
    """
    try:
        return _ready(python or sys.executable, places or SearchPaths.of_this_process())
    except EnvironmentUnusable as error:
        return Refusal(error.message, error.hint)


def _ready(python: str, places: SearchPaths) -> Ready:
    _refuse_other_tools(places.environment)
    _refuse_old_driver(places.root)
    packages = [] if python == sys.executable else _packages(python, places.environment)
    places = replace(places, packages=(*places.packages, *packages))
    native, library = find_recorder(places), find_sanitizer_library(places)
    check_structures(_layouts(python, places.environment, native, library), library)
    return Ready(library.path, library.version, native, find_frame_readers(places), packages)


def _refuse_other_tools(environment: Mapping[str, str]) -> None:
    if tool := environment.get(_INJECTION):
        raise _occupied(_INJECTION, f"loads {tool} into CUDA programs")
    for name in _LOADING:
        if _TOOLS.search(environment.get(name, "")):
            raise _occupied(name, f"loads another tool: {environment[name]}")
    for name, tool in _RUNNING_UNDER.items():
        if name in environment:
            raise _occupied(name, f"says that {tool} runs this program")


def _occupied(variable: str, what: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"{variable} {what}, and only one tool can watch a process",
        hint=f"run cudakit outside of that tool, or unset {variable}",
    )


def _refuse_old_driver(root: Path) -> None:
    try:
        text = (root / _DRIVER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # no driver, or its version is hidden: a program without CUDA needs none
    found = _DRIVER_VERSION.search(text)
    if found and int(found[2]) < _OLDEST_DRIVER:
        raise EnvironmentUnusable(
            f"the driver is {found[1]}, and events are reported from {_OLDEST_DRIVER} on",
            hint=f"install a driver of the {_OLDEST_DRIVER} series or newer",
        )


def _packages(python: str, environment: Mapping[str, str]) -> list[str]:
    """Return the search path of the program's interpreter."""
    answer = _answer([python, str(_TRIAL)], environment)
    version = ".".join(map(str, answer["version"]))
    if answer["name"] != "cpython" or tuple(answer["version"]) < _OLDEST_PYTHON:
        raise EnvironmentUnusable(
            f"{python} is {answer['name']} {version}, and the recorder needs CPython 3.11 or newer",
            hint="name another interpreter with --python",
        )
    return [str(place) for place in answer["packages"]]


def _layouts(
    python: str, environment: Mapping[str, str], recorder: Path, library: Library
) -> Mapping[str, Layout]:
    """Try the recorder; return the struct layouts that it was compiled with."""
    command = [python, "-I", "-S", str(_TRIAL), str(recorder), str(library.path)]
    answer = _answer(command, environment)
    if "error" in answer:
        raise EnvironmentUnusable(
            f"the recorder does not work with {library}: {answer['error']}",
            hint="pip install --upgrade cudakit nvidia-cuda-sanitizer-api",
        )
    layouts: Mapping[str, Layout] = answer["offsets"]
    return layouts


def _answer(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(  # noqa: S603 the program's interpreter, on a file of ours
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unanswered(command, str(error)) from error
    try:
        answer = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _unanswered(command, _end(done.returncode, done.stderr))
    return answer


def _end(status: int, complaints: str) -> str:
    how = f"it was killed by signal {-status}" if status < 0 else f"it ended with {status}"
    return ": ".join([how, *complaints.strip().splitlines()[-1:]])


def _unanswered(command: Sequence[str], why: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"the recorder could not be tried with {command[0]}: {why}",
        hint=f"see what this says: {shlex.join(command)}",
    )
