"""The rank of this process, from the environment variables of torchrun, Slurm or MPI."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from cudakit.errors import InputError, UsageError

# The variables of each launcher: rank, number of ranks, rank on the host. In a Slurm job, torchrun, Open MPI
# and Hydra (the launcher of MPICH and Intel MPI) start a daemon per node by srun, and the ranks inherit the
# Slurm variables of the daemon. So Slurm comes after these launchers.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # srun sets these variables; a batch script that starts no job step has no SLURM_STEP_NUM_TASKS.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # PMI without Hydra, such as that of Cray.
}
# Variables of the rank on the host that may be absent; then the rank among all processes is used.
_OPTIONAL_VARIABLES = ("LOCAL_RANK", "PMI_LOCAL_RANK")
# Variables that have equal values in all processes of a job, and other values in other jobs.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "I_MPI_HYDRA_UUID",
)
# Variables with the nodes of a Slurm step or job, whose first node has rank 0.
_NODE_LIST_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
# The variable with the number of ranks on this host, by the variable with the number of all ranks.
_LOCAL_COUNT_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE": "MPI_LOCALNRANKS",
}
_FIRST_PORT, _PORT_COUNT = 29_600, 1_000
_MAX_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process among the processes that a launcher started together, as a job."""

    launcher: str  # Name of the launcher: "torchrun".
    rank: int
    rank_count: int  # Number of processes.
    local_rank: int  # Rank among the processes on this host.
    job: (
        str  # Text that identifies the job: equal in all of its processes, different in other jobs.
    )
    host: str = ""  # Name or address of the host of rank 0; "" if unknown.
    port: int = 0  # TCP port of rank 0; 0 if unknown.


def detect_launch(variables: Mapping[str, str]) -> Launch | None:
    """Return the rank of this process and its job, or None if this process is the only one.

    Raises InputError for variables that contradict one another.
    """
    for launcher, variable_names in _LAUNCHERS.items():
        if not all(name in variables or name in _OPTIONAL_VARIABLES for name in variable_names):
            continue
        rank_variable, count_variable, local_rank_variable = variable_names
        rank, rank_count = (
            _read_number(variables, rank_variable),
            _read_number(variables, count_variable),
        )
        if rank_count <= 1:
            continue
        if rank >= rank_count:
            raise InputError(f"{rank_variable}={rank} must be below {count_variable}={rank_count}")
        local_rank = (
            _read_number(variables, local_rank_variable)
            if local_rank_variable in variables
            else rank
        )
        job = " ".join(variables.get(name, "") for name in _JOB_VARIABLES).strip()
        host, port = _find_address(launcher, variables, job)
        return Launch(launcher, rank, rank_count, local_rank, job, host, port)
    return None


def parse_address(text: str) -> tuple[str, int] | None:
    """Parse ``HOST:PORT``; return None for other text, which is the path of a file."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and "/" not in text):
        return None
    if not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rendezvous {text}: a port is a number from 1 to 65535")
    return host.strip("[]"), int(port)


def _find_address(launcher: str, variables: Mapping[str, str], job: str) -> tuple[str, int]:
    """Return the host and the port at which rank 0 listens; the host is "" if no variable contains it."""
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORT_COUNT
    if host := variables.get("MASTER_ADDR", ""):
        if "MASTER_PORT" in variables:
            port = _read_number(variables, "MASTER_PORT")
            # torchrun's agent itself listens at MASTER_PORT.
            port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return host, port
    count_variable = _LAUNCHERS[launcher][1]
    local_rank_count = variables.get(_LOCAL_COUNT_VARIABLES.get(count_variable, ""))
    if local_rank_count == variables[count_variable]:
        return "127.0.0.1", port
    for name in _NODE_LIST_VARIABLES:
        if name in variables:
            return _first_node(variables[name]), port
    return "", port


def _first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[03-05,09],login``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(name_part or "" for name_part in match.groups()) if match else nodes


def _read_number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not text.isdecimal() or int(text) > _MAX_RANKS:
        raise InputError(f"{name} is {text!r}; it must be a number from 0 to {_MAX_RANKS}")
    return int(text)
