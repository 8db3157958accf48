"""The rendezvous: all processes of a job connect to the process of rank 0 by TCP.

Rank 0 listens at an address that all processes know, or at a free port that it writes to a file. Messages
are JSON objects with a length before them. Rank 0 refuses processes of other jobs, because several jobs may
share a host.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudakit.bench.collectives.launch import Launch, parse_address
from cudakit.errors import CollectiveError, InputError

# If a port is taken, rank 0 listens at one of the next ports; the other ranks try these ports in turn.
_PORT_COUNT = 8
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_GREETING = "cudakit bench nccl 1"
_MAX_MESSAGE_BYTES = 64 << 20
_HELLO_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_LENGTH_PREFIX = struct.Struct("!I")
# Options that end a connection 20 s after the last answer of the other host, for example because its network
# failed: after 5 s without data the kernel sends a keepalive probe every 5 s (tcp(7)).
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}

Message = dict[str, Any]


class Connection:
    """A TCP connection that transfers JSON objects."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()  # Held while a message is sent.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def local_host(self) -> str:
        """Address of this end of the connection."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        content = json.dumps(message).encode()
        with self._lock:
            self._socket.sendall(_LENGTH_PREFIX.pack(len(content)) + content)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after the other process or its host ended.

        Raises TimeoutError after ``timeout_s``, ValueError for bytes that are no message.
        """
        self._socket.settimeout(timeout_s)
        try:
            size_bytes = _LENGTH_PREFIX.unpack(self._read(_LENGTH_PREFIX.size))[0]
            if size_bytes > _MAX_MESSAGE_BYTES:
                raise ValueError("the message is too large")
            message = json.loads(self._read(size_bytes))
        except OSError as error:
            # The timeout of settimeout has no number; ETIMEDOUT means that the host does not answer.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            return None
        if not isinstance(message, dict):
            raise ValueError("the message is not a JSON object")
        return message

    def close(self) -> None:
        """Close the connection, also if another thread waits in ``receive``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < size_bytes:
            received_bytes = self._socket.recv(size_bytes - len(content))
            if not received_bytes:
                raise ConnectionResetError("the connection was closed")
            content += received_bytes
        return bytes(content)


def reachable_host(connections: Iterable[Connection]) -> str:
    """Return an address of this host that all other ranks reach."""
    hosts = [connection.local_host for connection in connections]
    return next((host for host in hosts if host not in _LOOPBACK_HOSTS), hosts[0])


def accept_ranks(
    launch: Launch, rendezvous: str, timeout_s: float
) -> dict[int, tuple[Connection, Message]]:
    """Return the connections of all other ranks, each with the rank's first message.

    ``rendezvous`` is the address or the file that the user gave, or "". Raises CollectiveError with the
    numbers of the missing ranks after ``timeout_s``.
    """
    target = _find_target(launch, rendezvous)
    server, token = _listen(target), ""
    port = server.getsockname()[1]
    if target.file:
        token = secrets.token_hex(8)
        _write_address(target.file, port, token)
    connection_by_rank: dict[int, tuple[Connection, Message]] = {}
    try:
        with server:
            deadline_s = time.monotonic() + timeout_s
            while len(connection_by_rank) < launch.rank_count - 1:
                server.settimeout(max(deadline_s - time.monotonic(), 0.001))
                try:
                    accepted_socket = Connection(server.accept()[0])
                except TimeoutError:
                    server_address = target.describe(port)
                    raise _missing_error(
                        launch, set(connection_by_rank), server_address, timeout_s
                    ) from None
                hello = _read_hello(accepted_socket, launch, token)
                if hello is None or hello["rank"] in connection_by_rank:
                    accepted_socket.close()
                else:
                    connection_by_rank[int(hello["rank"])] = accepted_socket, hello
    except BaseException as error:
        for connection, _ in connection_by_rank.values():
            with suppress(OSError):
                connection.send({"ended": getattr(error, "message", "rank 0 was interrupted")})
            connection.close()
        raise
    finally:
        if target.file:
            Path(target.file).unlink(missing_ok=True)
    return connection_by_rank


def join(launch: Launch, rendezvous: str, facts: Message, timeout_s: float) -> Connection:
    """Connect to rank 0, and send it the facts of this rank.

    Raises CollectiveError if rank 0 does not answer within ``timeout_s``.
    """
    target = _find_target(launch, rendezvous)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        addresses = _read_addresses(target.file) if target.file else _candidate_addresses(target)
        for host, port, token in addresses:
            if connection := _try_to_join(host, port, launch, facts | {"token": token}):
                return connection
        time.sleep(_RETRY_S)
    raise CollectiveError(
        f"rank {launch.rank}: rank 0 did not answer at {target.describe()} within {timeout_s:g} s",
        hint="start all ranks at the same time, or allow more time with --rank-timeout",
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The meeting point of the ranks: an address on the host of rank 0, or a file that contains it."""

    file: str  # Path of the file; "" for an address.
    host: str
    port: int  # First port that rank 0 tries; 0 for any free port.

    def describe(self, port: int = 0) -> str:
        """Return the file, or the host and the port at which rank 0 listens."""
        return self.file or f"{self.host}:{port or self.port}"


def _find_target(launch: Launch, rendezvous: str) -> _Target:
    """Return the target that ``rendezvous`` names, or if it is "" the target of the launcher."""
    if rendezvous:
        address = parse_address(rendezvous)
        return _Target("", *address) if address else _Target(rendezvous, "", 0)
    if not launch.host:
        raise InputError(
            f"{launch.launcher} does not tell on which host rank 0 runs",
            hint="add --rendezvous HOST:PORT, or set MASTER_ADDR and MASTER_PORT",
        )
    return _Target("", launch.host, launch.port)


def _listen(target: _Target) -> socket.socket:
    """Listen at the port of a target, or at one of the next ports if that port is taken.

    Rank 0 listens on all network interfaces unless its address is that of the loopback interface: the
    name of a host often stands for another address on the host itself.
    """
    host, first_port = target.host, target.port
    interface = host if host in _LOOPBACK_HOSTS else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error = OSError()
    for port in range(first_port, first_port + _PORT_COUNT) if first_port else (0,):
        try:
            return socket.create_server((interface, port), family=family)
        except OSError as bind_error:
            error = bind_error
    raise CollectiveError(
        f"rank 0 cannot listen at {host}:{first_port}: {error.strerror}",
        hint="add --rendezvous HOST:PORT with a free port",
    )


def _read_hello(connection: Connection, launch: Launch, token: str) -> Message | None:
    """Answer and return the first message of a rank; return None if another program connected."""
    try:
        hello = connection.receive(_HELLO_TIMEOUT_S)
        if (
            hello is None
            or hello.get("greeting") != _GREETING
            or hello.get("job") != launch.job
            or hello.get("token", "") != token
            or hello.get("ranks") != launch.rank_count
            or hello.get("rank") not in range(1, launch.rank_count)
        ):
            return None
        connection.send({"greeting": _GREETING})
    except (OSError, ValueError, RecursionError):
        return None
    return hello


def _try_to_join(host: str, port: int, launch: Launch, facts: Message) -> Connection | None:
    """Return a connection to rank 0, or None if another program or no program listens at the address."""
    try:
        connection = Connection(socket.create_connection((host, port), timeout=_HELLO_TIMEOUT_S))
    except OSError:
        return None
    identity = {"job": launch.job, "rank": launch.rank, "ranks": launch.rank_count}
    try:
        connection.send({"greeting": _GREETING, **identity, **facts})
        answer = connection.receive(_HELLO_TIMEOUT_S)
        if answer is not None and answer.get("greeting") == _GREETING:
            return connection
    except (OSError, ValueError):
        pass
    connection.close()
    return None


def _candidate_addresses(target: _Target) -> list[tuple[str, int, str]]:
    """Return the addresses at which rank 0 may listen, each with an empty token."""
    return [(target.host, port, "") for port in range(target.port, target.port + _PORT_COUNT)]


def _write_address(file: str, port: int, token: str) -> None:
    """Write the address of rank 0 to a file. A rename makes the complete file visible at once."""
    content = json.dumps({"host": socket.gethostname(), "port": port, "token": token})
    partial_file = Path(f"{file}.{os.getpid()}")
    try:
        partial_file.write_text(content, encoding="utf-8")
        partial_file.replace(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error


def _read_addresses(file: str) -> list[tuple[str, int, str]]:
    """Return the address and the token in a file; an empty list if the file does not exist or is damaged."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        host, port, token = content["host"], int(content["port"]), str(content["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [("127.0.0.1" if host == socket.gethostname() else host, port, token)]


def _missing_error(
    launch: Launch, connected_ranks: set[int], target: str, timeout_s: float
) -> CollectiveError:
    missing_ranks = [rank for rank in range(1, launch.rank_count) if rank not in connected_ranks]
    noun = "rank" if len(missing_ranks) == 1 else "ranks"
    rank_numbers_text = _join_numbers(missing_ranks)
    return CollectiveError(
        f"{noun} {rank_numbers_text} of {launch.rank_count} did not connect to {target}"
        f" within {timeout_s:g} s",
        hint="start all ranks at the same time, or allow more time with --rank-timeout",
    )


def _join_numbers(numbers: list[int]) -> str:
    """Join numbers as in ``1, 2 and 5``."""
    *first_numbers, last_number = map(str, numbers)
    return f"{', '.join(first_numbers)} and {last_number}" if first_numbers else last_number
