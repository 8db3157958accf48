"""The protocol between supervisor and agents: settings in the environment, messages in the spool."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

# The only directory added to the program's PYTHONPATH; it contains sitecustomize.py and nothing else.
AGENT = Path(__file__).parent / "agent" / "path"


@dataclass(frozen=True, slots=True)
class Settings:
    """The task of the agent in each process."""

    sanitize: bool = False  # record GPU work, on simulated devices too
    memory: Path | None = None  # record memory and save snapshots under this name
    library: str = ""  # path of the Sanitizer API's library; empty: record no calls of CUDA
    recorder: str = ""  # path of the native recorder; empty: record simulated devices only
    # Paths of the extensions that read Python stacks, by sys.implementation.cache_tag.
    frames: Mapping[str, str] = field(default_factory=dict)
    # Paths of the device patches, by compute capability: "90".
    patches: Mapping[str, str] = field(default_factory=dict)
    follow: bool = True  # record child processes too


def child_environment(
    environment: Mapping[str, str], settings: Settings, spool: Path
) -> dict[str, str]:
    """Return an environment in which every Python starts the agent."""
    child = _without_agent(environment)
    paths = [str(AGENT), *filter(None, [child.get("PYTHONPATH")])]
    child["PYTHONPATH"] = os.pathsep.join(paths)
    child["CUDAKIT_AGENT"] = json.dumps(_agent_settings(settings, spool))
    if settings.sanitize:
        child["CUDAKIT_SPOOL"] = str(spool)
    return child


def _agent_settings(settings: Settings, spool: Path) -> dict[str, Any]:
    memory = os.path.abspath(settings.memory) if settings.memory else None
    return {
        **asdict(settings),
        "memory": memory,
        "spool": str(spool),
        "supervisor": os.getpid(),
    }


def _without_agent(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of an outer supervisor: a program has only one."""
    rest = {name: environment[name] for name in environment if not name.startswith("CUDAKIT_SPOOL")}
    if "PYTHONPATH" in rest:
        entries = rest["PYTHONPATH"].split(os.pathsep)
        rest["PYTHONPATH"] = os.pathsep.join(path for path in entries if path != str(AGENT))
    return rest


# --- from the agents

_PID_DIGITS = 7  # Linux allows PIDs up to 2^22


class About(StrEnum):
    """The subject of a message, and the suffix of the files with such messages."""

    FAILED = "failed"  # the agent cannot perform a task; the text says why
    UNRECORDED = "unrecorded"  # the process runs without being recorded; the text says why
    INCOMPLETE = "incomplete"  # recorded events are missing; the text says which and why
    SNAPSHOTS = "snapshots"  # torch saved a memory snapshot; the text is its path
    MEMORY = "memory"  # memory is recorded; the text is the path for the snapshot of the process
    JAX = "jax"  # a profile of the arrays of JAX; the text is JSON (core/memory/record/jax_profile.py)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message from an agent: one line in a file of its process."""

    process: int  # PID; 0: the supervisor itself
    about: About
    text: str


class Notices:
    """Reads the messages of agents in a spool."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}

    def new(self) -> Iterator[Notice]:
        """Yield the complete messages since the last call."""
        for name in sorted(os.listdir(self._directory)):
            process, _, suffix = name.partition(".")
            if process.isdecimal() and len(process) <= _PID_DIGITS and suffix in set(About):
                for line in self._lines(name):
                    yield Notice(int(process), About(suffix), line)

    def _lines(self, name: str) -> Iterator[str]:
        path = self._directory / name
        if path.is_symlink() or not path.is_file():
            return
        content = path.read_bytes()[self._read.get(name, 0) :]
        whole = content[: content.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        for line in whole.splitlines():
            yield line.decode("utf-8", "surrogateescape")
