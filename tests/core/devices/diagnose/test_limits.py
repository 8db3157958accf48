from __future__ import annotations

from pathlib import Path

from core.devices.diagnose.machines import (
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    files,
    healthy,
    judged,
)

from cudakit.gpu.api.run_context import SHARED_MEMORY, Limits
from cudakit.units import Unavailable


def test_memory_that_is_not_limited_is_well(machine: Machine) -> None:
    assert judged("CK034", machine()).status is OK
    assert judged("CK035", machine()).status is OK


def test_limits_that_are_not_known_are_not_judged(machine: Machine) -> None:
    unknown = machine(shared_memory_bytes=Unavailable("none"), limits=Unavailable("none"))

    assert judged("CK034", unknown).status is UNKNOWN
    assert judged("CK035", unknown).status is UNKNOWN


# --- CK034: shared memory --------------------------------------------------------------------------


def test_the_shared_memory_of_dockers_default_is_too_small(
    machine: Machine, tmp_path: Path
) -> None:
    files(tmp_path, {"/.dockerenv": ""})

    found = judged("CK034", machine(shared_memory_bytes=64 << 20))

    assert found.status is WARN
    assert found.evidence == {SHARED_MEMORY: "64.0 MiB"}
    assert found.fix[0].startswith("docker run --ipc=host")


def test_outside_of_a_container_it_is_mounted_larger(machine: Machine) -> None:
    assert judged("CK034", machine(shared_memory_bytes=64 << 20)).fix[0].startswith("sudo mount")


# --- CK035: limits ---------------------------------------------------------------------------------


def test_a_limited_address_space_keeps_cuda_from_starting(machine: Machine) -> None:
    found = judged("CK035", machine(limits=Limits(64 << 30, None)))

    assert found.status is WARN
    assert "the address space is limited to 64.0 GiB: CUDA may run out" in found.summary


def test_strict_overcommit_keeps_cuda_from_reserving_addresses(tmp_path: Path) -> None:
    strict = files(tmp_path, SYSTEM | {"/proc/sys/vm/overcommit_memory": "2"})

    assert "vm.overcommit_memory is 2" in judged("CK035", healthy(strict)).summary


def test_locked_memory_matters_with_infiniband_only(machine: Machine, tmp_path: Path) -> None:
    little = Limits(None, 64 << 10)

    assert judged("CK035", machine(limits=little)).status is OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "InfiniBand (mlx5_0) needs more" in judged("CK035", machine(limits=little)).summary
