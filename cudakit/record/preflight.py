"""Check, before the program starts, that recording works."""

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
from cudakit.record.installed import (
    CUPTI_OVERRIDE,
    SearchPaths,
    driver_version,
    find_cupti,
    find_frame_readers,
    find_recorder,
    find_sanitizer_library,
    is_recorder,
)
from cudakit.record.struct_layouts import check_structures

# The first driver that makes callbacks for events and waits (Sanitizer_CallbackIdEvents).
_OLDEST_DRIVER = 515

_OLDEST_PYTHON = (3, 11)
_TRIAL_SCRIPT = Path(__file__).with_name("try_recorder.py")
_TRIAL_TIMEOUT_S = 30

# Only one tool can subscribe in a process, to the Sanitizer API or to CUPTI. These variables attach other
# tools.
_INJECTION_VARIABLE = "CUDA_INJECTION64_PATH"
_PRELOAD_VARIABLES = ("LD_PRELOAD", "NVTX_INJECTION64_PATH")
_TOOL_NAMES = re.compile(
    r"sanitizer|nsys|nsight|ncu\b|ToolsInjection|TreeLauncher|cupti", re.IGNORECASE
)
_TOOL_VARIABLES = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_TPS_LAUNCH_TOKEN": "Nsight Compute or Compute Sanitizer",
    "NV_SANITIZER_INJECTION_PORT_BASE": "Compute Sanitizer",
}


@dataclass(frozen=True, slots=True)
class RecorderFiles:
    """The files that a recording or a profile uses, after all checks passed."""

    library: Path  # path of libsanitizer-public.so, or of libcupti.so for a profile
    recorder: Path  # path of the native recorder
    # Modules that read Python frames, by sys.implementation.cache_tag.
    frame_modules: Mapping[str, Path]
    packages: Sequence[str] = ()  # the program's search path; empty for cudakit's own interpreter
    patches: Mapping[int, Path] = field(default_factory=dict)  # device patches, by capability (90)
    # Whether launches with known accesses are left unrecorded (--accesses auto).
    templates: bool = False
    is_profile: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the paths that are passed to the program in its environment, as JSON values."""
        return {
            "cupti" if self.is_profile else "library": str(self.library),
            "recorder": str(self.recorder),
            "frames": {tag: str(path) for tag, path in self.frame_modules.items()},
            "patches": {
                str(architecture): str(path) for architecture, path in self.patches.items()
            },
            "templates": self.templates,
        }


def preflight(
    python: str | None, *, profile: bool = False, paths: SearchPaths | None = None
) -> RecorderFiles | EnvironmentUnusable:
    """Check whether programs of an interpreter can be recorded on this machine; return the reason if not.

    ``python`` is the path of the interpreter, or None for the interpreter that runs cudakit. ``profile``
    checks for CUPTI instead of the Sanitizer API. ``paths`` replaces the search paths of this process. CUDA
    is not loaded into this process: the recorder is tried in another process.
    """
    paths = paths or SearchPaths.of_this_process()
    try:
        return _find_files(python or sys.executable, paths, profile=profile)
    except EnvironmentUnusable as error:
        return error


def _find_files(python: str, paths: SearchPaths, *, profile: bool) -> RecorderFiles:
    refuse_other_tools(paths.environment)
    driver = driver_version(paths.root)
    if not profile and driver and driver[1] < _OLDEST_DRIVER:
        raise EnvironmentUnusable(
            f"driver {driver[0]} is too old: it does not report CUDA events",
            hint=f"install driver {_OLDEST_DRIVER} or newer",
        )
    packages = [] if python == sys.executable else search_path(python, paths.environment)
    if profile:
        # The program's packages come first: its framework loads CUPTI from there.
        paths = replace(paths, packages=(*packages, *paths.packages))
        recorder, cupti = find_recorder(paths), find_cupti(paths)
        result = try_library(python, paths.environment, recorder, cupti.path, "profile")
        if "error" in result:
            raise EnvironmentUnusable(
                f"programs cannot be profiled: {result['error']}",
                hint=f"the library is {cupti.path}; {CUPTI_OVERRIDE}=FILE names another one",
            )
        return RecorderFiles(cupti.path, recorder, find_frame_readers(paths), is_profile=True)
    paths = replace(paths, packages=(*paths.packages, *packages))
    recorder, library = find_recorder(paths), find_sanitizer_library(paths)
    result = try_library(python, paths.environment, recorder, library.path)
    if "error" in result:
        raise EnvironmentUnusable(
            f"the recorder does not work with {library}: {result['error']}",
            hint="pip install --upgrade cudakit nvidia-cuda-sanitizer-api",
        )
    check_structures(result["offsets"], library)
    return RecorderFiles(library.path, recorder, find_frame_readers(paths), packages)


def refuse_other_tools(environment: Mapping[str, str]) -> None:
    """Raise EnvironmentUnusable if the environment attaches another tool to CUDA programs."""
    tool = environment.get(_INJECTION_VARIABLE)
    if tool and not is_recorder(tool):
        raise _other_tool_error(_INJECTION_VARIABLE, f"loads {tool} into CUDA programs")
    for name in _PRELOAD_VARIABLES:
        variable_value = environment.get(name, "")
        if _TOOL_NAMES.search(variable_value) and not is_recorder(variable_value):
            raise _other_tool_error(name, f"loads another tool: {variable_value}")
    for name, tool in _TOOL_VARIABLES.items():
        if name in environment:
            raise _other_tool_error(name, f"is set, so {tool} is attached to this program")


def _other_tool_error(variable: str, effect: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"{variable} {effect}; only one tool can attach to a process",
        hint=f"run cudakit without that tool, or unset {variable}",
    )


def search_path(python: str, environment: Mapping[str, str]) -> list[str]:
    """Return the search path of the program's interpreter. Raises EnvironmentUnusable."""
    result = _run_json([python, str(_TRIAL_SCRIPT)], environment)
    version = ".".join(map(str, result["version"]))
    if result["name"] != "cpython" or tuple(result["version"]) < _OLDEST_PYTHON:
        raise EnvironmentUnusable(
            f"{python} is {result['name']} {version}; the recorder needs CPython 3.11 or newer",
            hint="choose another interpreter with --python",
        )
    return [str(path) for path in result["packages"]]


def try_library(
    python: str, environment: Mapping[str, str], recorder: Path, *arguments: Path | str
) -> dict[str, Any]:
    """Load NVIDIA's library in a separate process; return the result of ``try_recorder.py``.

    Raises EnvironmentUnusable if the process fails.
    """
    script_arguments = map(str, (_TRIAL_SCRIPT, recorder, *arguments))
    return _run_json([python, "-I", "-S", *script_arguments], environment)


def _run_json(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        completed_process = subprocess.run(  # noqa: S603 runs a script of cudakit with the program's interpreter
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _trial_error(command, str(error)) from error
    try:
        result = json.loads(completed_process.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        result = None
    if not isinstance(result, dict):
        status = completed_process.returncode
        end = f"it was killed by signal {-status}" if status < 0 else f"it ended with {status}"
        last_lines = completed_process.stderr.strip().splitlines()[-1:]
        raise _trial_error(command, ": ".join([end, *last_lines]))
    return result


def _trial_error(command: Sequence[str], reason: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"the recorder could not be tested with {command[0]}: {reason}",
        hint=f"run this command to see the error: {shlex.join(command)}",
    )
