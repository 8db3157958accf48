"""The protocol between supervisor and agents: settings in the environment, messages in the spool."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from cudakit.record.installed import is_recorder
from cudakit.stacks import LIBRARY_FILE, TYPED_CODE

# The only directory added to the program's PYTHONPATH; it contains sitecustomize.py and nothing else.
AGENT = Path(__file__).parent / "agent" / "path"
# The library that NVTX loads at its first call.
_NVTX_TOOL = "NVTX_INJECTION64_PATH"
# The library that the CUDA driver loads at the first use of CUDA.
_CUDA_TOOL = "CUDA_INJECTION64_PATH"


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The times in which each process is profiled."""

    delay: float = 0.0  # seconds from the first use of CUDA until the profile begins
    # Seconds from the begin of the profile to its end; 0: it ends with the process.
    duration: float = 0.0
    range: str = ""  # name of the NVTX range in which a process is profiled; empty for any time
    paused: bool = False  # whether the profile waits for a call of cudaProfilerStart


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the agent in each process."""

    sanitize: bool = False  # whether to record GPU work, also on simulated devices
    memory: Path | None = None  # path of memory snapshots; None to record no memory
    profile: ProfileSettings | None = None  # None to record no profile
    cupti: str = ""  # path of CUPTI's library; empty to record no profile
    library: str = ""  # path of the Sanitizer API's library; empty to record no calls of CUDA
    recorder: str = ""  # path of the native recorder; empty to record simulated devices only
    # Paths of the extensions that read Python stacks, by sys.implementation.cache_tag.
    frames: Mapping[str, str] = field(default_factory=dict)
    # Paths of the device patches, by compute capability, such as "90".
    patches: Mapping[str, str] = field(default_factory=dict)
    # Whether launches with known accesses are left unrecorded (--accesses auto).
    templates: bool = False
    follow: bool = True  # whether to record child processes


def child_environment(
    environment: Mapping[str, str], settings: Settings, spool: Path
) -> dict[str, str]:
    """Return an environment in which every Python process starts the agent."""
    variables = {
        name: environment[name] for name in environment if not name.startswith("CUDAKIT_SPOOL")
    }
    # A program has only one supervisor: what another one has set is removed.
    for name in (_NVTX_TOOL, _CUDA_TOOL):
        if is_recorder(variables.get(name, "")):
            del variables[name]
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    other_paths = os.pathsep.join(path for path in paths if path != str(AGENT))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(AGENT), other_paths)))
    agent_settings = {
        **asdict(settings),
        "memory": os.path.abspath(settings.memory) if settings.memory else None,
        # The rule by which the reader of Python stacks tells frames of the program from those of libraries.
        "program_files": [LIBRARY_FILE, TYPED_CODE],
        "spool": str(spool),
        "supervisor": os.getpid(),
    }
    variables["CUDAKIT_AGENT"] = json.dumps(agent_settings)
    if settings.sanitize or settings.profile:
        # gpu/sim/recorder.py reads these variables
        variables["CUDAKIT_SPOOL"] = str(spool)
        variables["CUDAKIT_SPOOL_FRAMES"] = "cudakit.record._frames"
    if settings.profile:
        variables["CUDAKIT_SPOOL_EVENTS"] = "profile"
    return variables


# --- messages of the agents

_PID_DIGITS = 7  # Linux allows PIDs up to 2^22


class AgentMessageKind(StrEnum):
    """The kind of a message, which is also the suffix of the files with such messages."""

    FAILED = "failed"  # the agent cannot perform a task; the text is the reason
    UNRECORDED = "unrecorded"  # the process is not recorded; the text is the reason
    INCOMPLETE = "incomplete"  # recorded events are missing; the text describes them and the reason
    SNAPSHOTS = "snapshots"  # torch saved a memory snapshot; the text is the path of the snapshot
    MEMORY = "memory"  # memory is recorded; the text is the path for the snapshot of the process
    JAX = "jax"  # JAX has arrays; the text is their profile in JSON (memory/jax_profile.py)


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """A message from an agent: one line in a file of the agent's process."""

    process: int  # PID of the agent's process; 0 for a message of the supervisor
    kind: AgentMessageKind
    text: str


class AgentMessages:
    """Reads the messages of agents in a spool."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[str, int] = {}  # number of bytes read of each file

    def read_new(self) -> Iterator[AgentMessage]:
        """Yield the complete messages that were written since the last call."""
        for name in sorted(os.listdir(self._directory)):
            process_text, _, suffix = name.partition(".")
            if (
                process_text.isdecimal()
                and len(process_text) <= _PID_DIGITS
                and suffix in set(AgentMessageKind)
            ):
                path = self._directory / name
                if path.is_symlink() or not path.is_file():
                    continue
                read_bytes = self._read_bytes.get(name, 0)
                new_content = path.read_bytes()[read_bytes:]
                complete_lines = new_content[: new_content.rfind(b"\n") + 1]
                self._read_bytes[name] = read_bytes + len(complete_lines)
                for line in complete_lines.splitlines():
                    text = line.decode("utf-8", "surrogateescape")
                    yield AgentMessage(int(process_text), AgentMessageKind(suffix), text)
