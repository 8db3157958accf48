"""The environment of the program: it makes each Python start the agent, and tells the agent what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The one directory of ours that the program gets to see; it holds sitecustomize.py and nothing else.
AGENT = Path(__file__).parent / "agent" / "path"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent is to do in each process."""

    sanitize: bool = False  # record what is enqueued on GPUs, simulated ones included
    memory: Path | None = None  # record the memory of torch, and save it under this name
    library: str = ""  # of the Sanitizer API
    recorder: str = ""  # the native recorder; empty: only simulated devices are recorded
    frames: Mapping[str, str] = field(default_factory=dict)  # what reads stacks, by cache tag
    patches: Mapping[str, str] = field(default_factory=dict)  # of exact accesses, by capability
    follow: bool = True  # into processes that are started by the program


def child_environment(
    environment: Mapping[str, str], settings: Settings, spool: Path
) -> dict[str, str]:
    """Return an environment in which every Python starts the agent, which writes to a spool."""
    ours = _without_agent(environment)
    paths = [str(AGENT), *filter(None, [ours.get("PYTHONPATH")])]
    ours["PYTHONPATH"] = os.pathsep.join(paths)
    ours["CUDAKIT_AGENT"] = json.dumps(_told(settings, spool))
    if settings.sanitize:
        ours["CUDAKIT_SPOOL"] = str(spool)
    return ours


def _told(settings: Settings, spool: Path) -> dict[str, Any]:
    return {
        "spool": str(spool),
        "sanitize": settings.sanitize,
        "memory": os.path.abspath(settings.memory) if settings.memory else None,
        "library": settings.library,
        "recorder": settings.recorder,
        "frames": dict(settings.frames),
        "patches": dict(settings.patches),
        "follow": settings.follow,
        "supervisor": os.getpid(),
    }


def _without_agent(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a supervisor around this one has set: each program has one."""
    rest = {name: environment[name] for name in environment if not name.startswith("CUDAKIT_SPOOL")}
    if "PYTHONPATH" in rest:
        entries = rest["PYTHONPATH"].split(os.pathsep)
        rest["PYTHONPATH"] = os.pathsep.join(path for path in entries if path != str(AGENT))
    return rest
