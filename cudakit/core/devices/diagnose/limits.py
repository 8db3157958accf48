"""Does the system give a CUDA program the memory it counts on?"""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import CannotTell, Finding, ok, together, warn
from cudakit.gpu.api.run_context import SHARED_MEMORY, RunContext
from cudakit.units import Unavailable, format_bytes

# Docker's default is 64 MiB; a worker of a data loader passes batches of hundreds of MiB.
_LEAST_SHARED = 1 << 30
_IN_CONTAINER: tuple[str, ...] = (
    "docker run --ipc=host ...  (or --shm-size=8g)",
    "in Kubernetes: mount an emptyDir of medium Memory at /dev/shm",
)
_ELSEWHERE: tuple[str, ...] = ("sudo mount -o remount,size=8G /dev/shm",)
# CUDA reserves addresses for all memory of host and devices, and uses next to none of them.
_LEAST_ADDRESSES = 1 << 40
# Registering a buffer with an InfiniBand card locks it.
_LEAST_LOCKED = 1 << 30


def shared_memory(c: RunContext) -> Finding:
    """Data loaders and NCCL pass data between processes through /dev/shm.

    Docker gives a container 64 MiB of it, and PyTorch's workers then die with "Bus error" or
    "insufficient shared memory (shm)"; NCCL fails with "unhandled system error" or goes through sockets.
    """
    size = c.host.shared_memory_bytes
    if isinstance(size, Unavailable):
        raise CannotTell(size.reason)
    evidence = {SHARED_MEMORY: format_bytes(size)}
    if size >= _LEAST_SHARED:
        return ok(f"{SHARED_MEMORY} has {format_bytes(size)}", evidence)
    fixes = _IN_CONTAINER if c.host.container else _ELSEWHERE
    return warn(
        f"{SHARED_MEMORY} has only {format_bytes(size)}: workers of data loaders may die",
        evidence,
        *fixes,
    )


def process_limits(c: RunContext) -> Finding:
    """CUDA reserves far more addresses than it uses; where they are limited it fails with 2.

    A limit of address space (ulimit -v, as batch systems set it) and vm.overcommit_memory=2 both forbid
    that. With InfiniBand, memory is locked for the card, and a low ulimit -l makes NCCL fall back or
    fail; without InfiniBand the limit does not matter to CUDA.
    """
    if isinstance(c.limits, Unavailable):
        raise CannotTell(c.limits.reason)
    addresses, locked = c.limits.address_space_bytes, c.limits.locked_memory_bytes
    overcommit = c.host.overcommit_memory
    cards = c.host.infiniband
    evidence = {
        "address space (ulimit -v)": _size(addresses),
        "locked memory (ulimit -l)": _size(locked),
        "vm.overcommit_memory": overcommit or "?",
    }
    problems = []
    if addresses is not None and addresses < _LEAST_ADDRESSES:
        problems.append(
            warn(
                f"the address space is limited to {_size(addresses)}: CUDA may run out of it (2)",
                evidence,
                "ulimit -v unlimited, or ask the batch system for more memory",
            )
        )
    if overcommit == "2":
        problems.append(
            warn(
                "vm.overcommit_memory is 2: CUDA may find no addresses to reserve (2)",
                evidence,
                "sudo sysctl vm.overcommit_memory=0",
            )
        )
    if cards and locked is not None and locked < _LEAST_LOCKED:
        problems.append(
            warn(
                f"only {_size(locked)} can be locked, and InfiniBand ({', '.join(cards)}) needs more",
                evidence,
                "ulimit -l unlimited (docker run --ulimit memlock=-1)",
            )
        )
    return together(problems, otherwise=ok("no limit keeps CUDA from its memory", evidence))


def _size(limit: int | None) -> str:
    return "unlimited" if limit is None else format_bytes(limit)
