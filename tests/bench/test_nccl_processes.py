""""""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudakit.bench.nccl_processes import (
    Connection,
    Launch,
    accept_ranks,
    check_same_options,
    detect_launch,
    join,
    parse_address,
)
from cudakit.errors import CollectiveError, InputError, UsageError

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


TIMEOUT_S = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch_of(rank: int, ranks: int = 3, *, port: int = 0) -> Launch:
    return Launch("torchrun", rank, ranks, rank, "job", "127.0.0.1", port)


def join_all(
    pool: ThreadPoolExecutor, port: int, rendezvous: str = "", ranks: int = 3
) -> list[Future[Connection]]:
    return [
        pool.submit(
            join, launch_of(rank, ranks, port=port), rendezvous, {"name": f"r{rank}"}, TIMEOUT_S
        )
        for rank in range(1, ranks)
    ]


def close(*connections: Connection) -> None:
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("by_file", [False, True], ids=["address", "file"])
def test_ranks_connect_and_exchange_messages(tmp_path: Path, by_file: bool) -> None:
    port, rendezvous = free_port(), str(tmp_path / "ranks") if by_file else ""
    with ThreadPoolExecutor() as pool:
        joining = join_all(pool, port, rendezvous)
        accepted = accept_ranks(launch_of(0, port=port), rendezvous, TIMEOUT_S)
        joined = [future.result() for future in joining]

    assert {rank: hello["name"] for rank, (_, hello) in accepted.items()} == {1: "r1", 2: "r2"}
    for rank, (connection, _) in accepted.items():
        connection.send({"for": rank})
    assert [connection.receive(1.0) for connection in joined] == [{"for": 1}, {"for": 2}]
    assert not list(tmp_path.iterdir())
    close(*joined, *(connection for connection, _ in accepted.values()))


def test_missing_ranks_are_named_after_the_timeout() -> None:
    port = free_port()
    begin_s = time.monotonic()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, launch_of(2, 4, port=port), "", {}, TIMEOUT_S)
        with pytest.raises(
            CollectiveError, match=r"^ranks 1 and 3 of 4 did not connect .* 0\.5 s$"
        ):
            accept_ranks(launch_of(0, 4, port=port), "", 0.5)
        connection = joining.result()

    assert time.monotonic() - begin_s < TIMEOUT_S / 2
    message = connection.receive(1.0)
    assert message
    assert "ranks 1 and 3" in message["ended"]
    close(connection)


def test_missing_rank_0_is_named_after_the_timeout() -> None:
    with pytest.raises(CollectiveError, match=r"rank 1: rank 0 did not answer at 127.0.0.1:\d+"):
        join(launch_of(1, port=free_port()), "", {}, 0.3)


def test_taken_port_is_skipped_by_all_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_program, ThreadPoolExecutor() as pool:
        port = int(other_program.getsockname()[1])
        joining = join_all(pool, port, ranks=2)
        accepted = accept_ranks(launch_of(0, 2, port=port), "", TIMEOUT_S)
        joined = joining[0].result()

    assert list(accepted) == [1]
    close(joined, accepted[1][0])


@pytest.mark.parametrize(
    "stranger",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"null\n",
        b"\xff\xff\xff\xff\n",
        b"{",
        b"",
    ],
)
def test_connection_of_another_program_is_ignored(stranger: bytes) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        accepting = pool.submit(accept_ranks, launch_of(0, 2, port=port), "", TIMEOUT_S)
        other_program = connect_soon(port)
        other_program.sendall(stranger)
        other_program.close()
        joined = join(launch_of(1, 2, port=port), "", {}, TIMEOUT_S)
        accepted = accepting.result()

    assert list(accepted) == [1]
    close(joined, accepted[1][0])


@pytest.mark.parametrize("change", [{"job": "other"}, {"rank_count": 3}, {"rank": 7}])
def test_rank_of_another_start_is_ignored(change: dict[str, Any]) -> None:
    port = free_port()
    stranger = replace(launch_of(1, 2, port=port), **change)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, stranger, "", {}, 1.0)
        with pytest.raises(CollectiveError, match="rank 1 of 2 did not connect"):
            accept_ranks(launch_of(0, 2, port=port), "", 1.5)
        with pytest.raises(CollectiveError, match="rank 0 did not answer"):
            joining.result()


def test_unknown_host_of_rank_0_is_an_error_with_the_option() -> None:
    launch = replace(launch_of(0), host="")
    with pytest.raises(InputError, match="rank 0") as raised:
        accept_ranks(launch, "", 0.1)

    assert "--rendezvous" in raised.value.hint


def test_damaged_file_of_a_rendezvous_is_retried_until_the_timeout(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text('{"host": "127.0.0.1"')
    with pytest.raises(CollectiveError, match="rank 0 did not answer"):
        join(launch_of(1), str(file), {}, 0.3)


def connect_soon(port: int) -> socket.socket:
    """Connect to a port whose server is about to start."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1.0)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


# Exchanges a message over the loopback interface of a network namespace, shuts the interface down, and prints
# the message that arrives then, and the seconds until it arrives. The ioctl calls read and write the flags of
# an interface (netdevice(7)), of which 1 is IFF_UP.
FAILING_NETWORK_PROGRAM = """
import fcntl, socket, struct, time
from cudakit.bench.nccl_processes import Connection
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914

def set_up(is_up):
    with socket.socket() as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", request)[1]
        request = struct.pack("16sh14x", b"lo", flags | 1 if is_up else flags & ~1)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)

set_up(True)
server = socket.create_server(("127.0.0.1", 0))
first = Connection(socket.create_connection(server.getsockname()))
second = Connection(server.accept()[0])
first.send({"number": 1})
assert second.receive() == {"number": 1}
set_up(False)
begin_s = time.monotonic()
print(second.receive(), round(time.monotonic() - begin_s))
"""


def test_connection_ends_if_the_network_fails() -> None:
    namespace = ("unshare", "--user", "--map-root-user", "--net")
    if not shutil.which("unshare") or subprocess.run((*namespace, "true"), check=False).returncode:
        pytest.skip("network namespaces cannot be created here")
    done = subprocess.run(
        [*namespace, sys.executable, "-P", "-c", FAILING_NETWORK_PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )

    message, seconds = done.stdout.split()
    assert message == "None"
    assert int(seconds) <= 30


PROCESS_FACTS = {
    "host": "gpu01",
    "version": "0.1.0",
    "options": {"--sizes": "1024", "--gpu": "auto"},
}


def test_ranks_with_the_same_version_and_options_are_accepted() -> None:
    check_same_options(PROCESS_FACTS, PROCESS_FACTS | {"host": "gpu02"}, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.2.0"}, "rank 3 on gpu02 has cudakit 0.2.0, rank 0 on gpu01 has 0.1.0"),
        (
            {"options": {"--sizes": "2048", "--gpu": "auto"}},
            "rank 3 on gpu02 has --sizes = 2048, rank 0 has 1024",
        ),
        ({"options": {"--sizes": "1024"}}, "rank 3 on gpu02 has --gpu = None, rank 0 has auto"),
    ],
)
def test_rank_with_another_version_or_option_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_same_options(PROCESS_FACTS, PROCESS_FACTS | {"host": "gpu02"} | changes, 3)
