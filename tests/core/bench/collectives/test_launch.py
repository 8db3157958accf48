from __future__ import annotations

import pytest

from cudakit.core.bench.collectives.launch import Launch, detect_launch, parse_address
from cudakit.errors import InputError, UsageError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_variables_of_torchrun_give_the_place_and_the_address() -> None:
    assert detect_launch(TORCHRUN) == Launch("torchrun", 3, 8, 1, "job-7", "gpu01", 29500)


def test_port_after_that_of_the_torchrun_agent_is_used() -> None:
    launch = detect_launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})

    assert launch
    assert launch.port == 29501


def test_variables_of_slurm_give_the_first_node() -> None:
    launch = detect_launch(SLURM)

    assert launch
    assert (launch.launcher, launch.rank, launch.rank_count, launch.local_rank) == (
        "Slurm",
        9,
        16,
        1,
    )
    assert launch.host == "gpu07"
    assert launch.port == detect_launch(SLURM | {"SLURM_PROCID": "0"}).port  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-08,11]", "gpu07"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("node-a,node-b", "node-a"),
        ("node1", "node1"),
        ("a[1-2],b[3-4]", "a1"),
    ],
)
def test_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    launch = detect_launch(SLURM | {"SLURM_STEP_NODELIST": nodes})

    assert launch
    assert launch.host == first


def test_batch_script_of_slurm_without_a_step_is_a_single_process() -> None:
    assert detect_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_open_mpi_on_one_host_uses_the_loopback_address() -> None:
    launch = detect_launch(OPEN_MPI)

    assert launch
    assert (launch.rank, launch.host) == (1, "127.0.0.1")


def test_open_mpi_on_two_hosts_does_not_tell_the_address() -> None:
    launch = detect_launch(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})

    assert launch
    assert launch.host == ""


def test_pmi_variables_of_mpich_give_the_place() -> None:
    launch = detect_launch({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})

    assert launch
    assert (launch.launcher, launch.rank, launch.local_rank) == ("MPI", 1, 0)


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "2"}])
def test_single_process_has_no_launch(variables: dict[str, str]) -> None:
    assert detect_launch(variables) is None


@pytest.mark.parametrize(
    "changes", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}, {"MASTER_PORT": "x"}]
)
def test_contradicting_variables_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        detect_launch(TORCHRUN | changes)


def test_address_and_file_of_a_rendezvous_are_distinguished() -> None:
    assert parse_address("gpu01:29500") == ("gpu01", 29500)
    assert parse_address("[::1]:29500") == ("::1", 29500)
    assert parse_address("/shared/run:1") is None
    assert parse_address("ranks.json") is None
    with pytest.raises(UsageError, match="port"):
        parse_address("gpu01:99999")
