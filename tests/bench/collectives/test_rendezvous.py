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

from cudakit.bench.collectives.launch import Launch
from cudakit.bench.collectives.rendezvous import Connection, accept_ranks, join
from cudakit.errors import CollectiveError, InputError

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
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x04null",
        b"\x00\x00\x00\x04\xff\xff\xff\xff",
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
from cudakit.bench.collectives.rendezvous import Connection
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
