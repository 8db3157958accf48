"""The protocol of the supervisor and the agents: settings in the environment, lines in the spool."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

# The only directory added to the program's path; it contains sitecustomize.py and nothing else.
AGENT = Path(__file__).parent / "agent" / "path"


@dataclass(frozen=True, slots=True)
class Settings:
    """The task of the agent in each process."""

    sanitize: bool = False  # record the work enqueued on GPUs, simulated ones included
    memory: Path | None = None  # record the memory of torch, and save the snapshot under this name
    library: str = ""  # of the Sanitizer API
    recorder: str = ""  # the native recorder; empty: only simulated devices are recorded
    frames: Mapping[str, str] = field(
        default_factory=dict
    )  # the extensions that read stacks, by cache tag
    patches: Mapping[str, str] = field(
        default_factory=dict
    )  # device patches, by compute capability
    follow: bool = True  # instrument child processes too


def child_environment(
    environment: Mapping[str, str], settings: Settings, spool: Path
) -> dict[str, str]:
    """Return an environment in which every Python starts the agent."""
    ours = _without_agent(environment)
    paths = [str(AGENT), *filter(None, [ours.get("PYTHONPATH")])]
    ours["PYTHONPATH"] = os.pathsep.join(paths)
    ours["CUDAKIT_AGENT"] = json.dumps(_agent_settings(settings, spool))
    if settings.sanitize:
        ours["CUDAKIT_SPOOL"] = str(spool)
    return ours


def _agent_settings(settings: Settings, spool: Path) -> dict[str, Any]:
    memory = os.path.abspath(settings.memory) if settings.memory else None
    return {
        **asdict(settings),
        "memory": memory,
        "spool": str(spool),
        "supervisor": os.getpid(),
    }


def _without_agent(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables of an outer supervisor: a program has one."""
    rest = {name: environment[name] for name in environment if not name.startswith("CUDAKIT_SPOOL")}
    if "PYTHONPATH" in rest:
        entries = rest["PYTHONPATH"].split(os.pathsep)
        rest["PYTHONPATH"] = os.pathsep.join(path for path in entries if path != str(AGENT))
    return rest


# --- from the agents


class About(StrEnum):
    """The subject of a line, and the suffix of the files with such lines."""

    FAILED = "failed"  # a task that the agent cannot perform, and why
    SNAPSHOTS = "snapshots"  # the path of a saved memory snapshot


@dataclass(frozen=True, slots=True)
class Notice:
    """A line from a process."""

    process: int  # 0: the supervisor itself
    about: About
    text: str


class Notices:
    """Reads the lines of agents in a spool."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, int] = {}

    def new(self) -> Iterator[Notice]:
        """Yield the lines since the last call."""
        for name in sorted(os.listdir(self._directory)):
            process, _, suffix = name.partition(".")
            if process.isdecimal() and suffix in set(About):
                for line in self._lines(name):
                    yield Notice(int(process), About(suffix), line)

    def _lines(self, name: str) -> Iterator[str]:
        content = (self._directory / name).read_bytes()[self._read.get(name, 0) :]
        whole = content[: content.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        for line in whole.splitlines():
            yield line.decode("utf-8", "surrogateescape")
