from __future__ import annotations

import pytest

from cudakit.bench.collectives.launch import Launch, detect_launch, parse_address
from cudakit.errors import InputError, UsageError

# Variables that torchrun sets (PyTorch documentation, "torchrun (Elastic Launch)", "Environment Variables").
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
}
# Variables of rank 3 of 4, the second rank on the second node, as srun of Slurm 22.05 sets them. srun(1),
# "OUTPUT ENVIRONMENT VARIABLES", explains their meaning.
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    "SLURMD_NODENAME": "gpu08",
}
# Variables of rank 1 of 2 as mpirun of Open MPI 5.0.11 sets them. The Open MPI documentation, "Environment
# variables set for MPI applications", explains their meaning.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-gpu01-7596@1",
    "PMIX_HOSTNAME": "gpu01",
}
# Variables of rank 1 of 2 as mpirun of MPICH 5.0.2 sets them.
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "gpu01",
    "HYDI_CONTROL_FD": "7",
}
# Variables of rank 1 of 2 as mpirun of Intel MPI 2021.19 sets them, without those of its tuning.
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "11",
    "I_MPI_HYDRA_UUID": "b53f0000-f988-702b-ed60-0600e9845e6b",
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
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
    assert (launch.launcher, launch.rank, launch.rank_count) == ("Slurm", 3, 4)
    assert launch.local_rank == 1
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


@pytest.mark.parametrize("variables", [MPICH, INTEL_MPI], ids=["MPICH", "Intel MPI"])
def test_variables_of_hydra_give_the_place(variables: dict[str, str]) -> None:
    launch = detect_launch(variables)

    assert launch
    assert (launch.launcher, launch.rank, launch.rank_count) == ("Hydra", 1, 2)
    assert (launch.local_rank, launch.host) == (1, "127.0.0.1")


def test_hydra_on_two_hosts_does_not_tell_the_address() -> None:
    launch = detect_launch(MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"})

    assert launch
    assert (launch.local_rank, launch.host) == (0, "")


def test_two_runs_of_intel_mpi_are_different_jobs() -> None:
    first, second = (detect_launch(INTEL_MPI | {"I_MPI_HYDRA_UUID": uuid}) for uuid in "ab")

    assert first
    assert second
    assert first.job != second.job


# The variables that a daemon of mpirun gets from srun, which starts one daemon per node.
DAEMON_OF_SLURM = SLURM | {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (MPICH | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "Hydra"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"),
        (TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4"}, "torchrun"),
    ],
)
def test_launcher_inside_a_slurm_job_has_precedence_over_the_variables_of_its_daemon(
    variables: dict[str, str], launcher: str
) -> None:
    launch = detect_launch(DAEMON_OF_SLURM | variables)

    assert launch
    assert (launch.launcher, launch.rank, launch.rank_count) == (launcher, 3, 4)
    assert launch.local_rank == 1
    assert launch.host == ("gpu01" if launcher == "torchrun" else "gpu07")


def test_srun_with_pmi_uses_the_variables_of_slurm() -> None:
    launch = detect_launch(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"})

    assert launch
    assert (launch.launcher, launch.local_rank) == ("Slurm", 1)


def test_interactive_step_of_salloc_is_a_single_process() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}

    assert detect_launch(SLURM | step) is None


@pytest.mark.parametrize("changes", [{}, {"PMI_LOCAL_RANK": "1"}])
def test_pmi_without_hydra_gives_the_place(changes: dict[str, str]) -> None:
    launch = detect_launch({"PMI_RANK": "1", "PMI_SIZE": "2"} | changes)

    assert launch
    assert (launch.launcher, launch.rank, launch.local_rank) == ("PMI", 1, 1)


def test_torchrun_variables_without_local_rank_suffice() -> None:
    launch = detect_launch({name: TORCHRUN[name] for name in TORCHRUN if name != "LOCAL_RANK"})

    assert launch
    assert launch.local_rank == launch.rank == 3


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
