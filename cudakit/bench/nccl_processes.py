"""Ranks of ``bench nccl`` in several processes: which rank this process is, and how the ranks connect.

All processes of a job connect to the process of rank 0 by TCP. Rank 0 listens at an address that all
processes know, or at a free port that it writes to a file. A message is a JSON object on one line. Rank 0
refuses processes of other jobs, because several jobs may share a host.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from cudakit.bench.nccl_ranks import CLOSE, END_TIMEOUT_S, REQUEST, Answers, Message, Rank
from cudakit.errors import CollectiveError, InputError, UsageError
from cudakit.gpu.api import Gpu

# The variables of each launcher: rank, number of ranks, rank on the host, and number of ranks on the host, ""
# if there is none. In a Slurm job, torchrun, Open MPI and Hydra (the launcher of MPICH and Intel MPI) start a
# daemon per node by srun, and the ranks inherit the Slurm variables of the daemon. So Slurm comes after these
# launchers.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", ""),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun sets these variables; a batch script that starts no job step has no SLURM_STEP_NUM_TASKS.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    # PMI without Hydra, such as that of Cray.
    "PMI": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "MPI_LOCALNRANKS"),
}
# Variables of the rank on the host that may be absent; then the rank among all processes is used.
_OPTIONAL_VARIABLES = {"LOCAL_RANK", "PMI_LOCAL_RANK"}
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
_FIRST_PORT, _PORTS_OF_JOBS = 29_600, 1_000
_MAX_RANKS = 100_000

# If a port is taken, rank 0 listens at one of the next ports; the other ranks try these ports in turn.
_TRIED_PORTS = 8
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_GREETING = "cudakit bench nccl 1"
_MAX_MESSAGE_BYTES = 64 << 20
_HELLO_TIMEOUT_S = 2.0
_RETRY_S = 0.1
# Options that end a connection 20 s after the last answer of the other host, for example because its network
# failed: after 5 s without data the kernel sends a keepalive probe every 5 s (tcp(7)).
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}
_START_HINT = "start all ranks at the same time, or allow more time with --rank-timeout"

# Key of the message that ends a rank early; its value is the reason.
_ENDED = "ended"


# --- the launcher -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process among the processes that a launcher started together, as a job."""

    launcher: str  # Name of the launcher: "torchrun".
    rank: int
    rank_count: int  # Number of processes.
    local_rank: int  # Rank among the processes on this host.
    job: str  # Identifies the job: equal in all of its processes, different in other jobs.
    host: str = ""  # Name or address of the host of rank 0; "" if unknown.
    port: int = 0  # TCP port of rank 0; 0 if unknown.


def detect_launch(variables: Mapping[str, str]) -> Launch | None:
    """Return the rank of this process and its job, or None if this process is the only one.

    Raises InputError for variables that contradict one another.
    """
    for launcher, (rank_name, count_name, local_rank_name, local_count_name) in _LAUNCHERS.items():
        names = {rank_name, count_name, local_rank_name} - _OPTIONAL_VARIABLES
        if not names <= variables.keys():
            continue
        rank, rank_count = _read_number(variables, rank_name), _read_number(variables, count_name)
        if rank_count <= 1:
            continue
        if rank >= rank_count:
            raise InputError(f"{rank_name}={rank} must be below {count_name}={rank_count}")
        if local_rank_name not in variables:
            local_rank_name = rank_name
        local_rank = _read_number(variables, local_rank_name)
        job = " ".join(variables.get(name, "") for name in _JOB_VARIABLES).strip()
        is_one_host = variables.get(local_count_name) == variables[count_name]
        host, port = _find_address(variables, job, is_one_host=is_one_host)
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


def _find_address(variables: Mapping[str, str], job: str, *, is_one_host: bool) -> tuple[str, int]:
    """Return the host and the port at which rank 0 listens; the host is "" if no variable contains it."""
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS_OF_JOBS
    if host := variables.get("MASTER_ADDR", ""):
        if "MASTER_PORT" in variables:
            port = _read_number(variables, "MASTER_PORT")
            # torchrun's agent itself listens at MASTER_PORT.
            port += variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return host, port
    if is_one_host:
        return "127.0.0.1", port
    for name in _NODE_LIST_VARIABLES:
        if name in variables:
            # A list such as "gpu[03-05,09],login".
            nodes = variables[name]
            match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
            return "".join(part or "" for part in match.groups()) if match else nodes, port
    return "", port


def _read_number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not text.isdecimal() or int(text) > _MAX_RANKS:
        raise InputError(f"{name} is {text!r}; it must be a number from 0 to {_MAX_RANKS}")
    return int(text)


# --- the rendezvous ---------------------------------------------------------------------------------


class Connection:
    """A TCP connection that transfers JSON objects."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lines = connection, connection.makefile("rb")
        self._lock = threading.Lock()  # Held while a message is sent.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def local_host(self) -> str:
        return str(self._socket.getsockname()[0])

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None after the other process or its host ended.

        Raises TimeoutError after ``timeout_s``, ValueError for bytes that are no message.
        """
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline(_MAX_MESSAGE_BYTES)
        except OSError as error:
            # The timeout of settimeout has no number; ETIMEDOUT means that the host does not answer.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            return None
        if not line.endswith(b"\n") and len(line) < _MAX_MESSAGE_BYTES:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("the message is not a JSON object")
        return message

    def close(self) -> None:
        """Close the connection, also if another thread waits in ``receive``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()


def reachable_host(connections: Iterable[Connection]) -> str:
    """Return an address of this host that all other ranks reach, given the connections to them."""
    hosts = [*(connection.local_host for connection in connections), "127.0.0.1"]
    return next((host for host in hosts if host not in _LOOPBACK_HOSTS), hosts[0])


def accept_ranks(
    launch: Launch, rendezvous: str, timeout_s: float
) -> dict[int, tuple[Connection, Message]]:
    """Return the connections of all other ranks, each with the rank's first message.

    ``rendezvous`` is the address or the file that the user gave, or "". Raises CollectiveError with the
    numbers of the missing ranks after ``timeout_s``.
    """
    file, host, first_port = _find_target(launch, rendezvous)
    server, token = _listen(host, first_port), ""
    port = server.getsockname()[1]
    if file:
        token = secrets.token_hex(8)
        content = json.dumps({"host": socket.gethostname(), "port": port, "token": token})
        partial_file = Path(f"{file}.{os.getpid()}")
        try:
            partial_file.write_text(content, encoding="utf-8")
            partial_file.replace(file)  # Makes the complete file visible at once.
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}") from error
    accepted: dict[int, tuple[Connection, Message]] = {}
    try:
        with server:
            deadline_s = time.monotonic() + timeout_s
            while missing_ranks := set(range(1, launch.rank_count)) - accepted.keys():
                server.settimeout(max(deadline_s - time.monotonic(), 0.001))
                try:
                    connection = Connection(server.accept()[0])
                except TimeoutError:
                    *first, last = map(str, sorted(missing_ranks))
                    ranks_text = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
                    raise CollectiveError(
                        f"{ranks_text} of {launch.rank_count} did not connect to "
                        f"{file or f'{host}:{port}'} within {timeout_s:g} s",
                        hint=_START_HINT,
                    ) from None
                hello = _read_hello(connection, launch, token)
                if hello is None or hello["rank"] in accepted:
                    connection.close()
                else:
                    accepted[int(hello["rank"])] = connection, hello
    except BaseException as error:
        for connection, _ in accepted.values():
            with suppress(OSError):
                connection.send({_ENDED: getattr(error, "message", "rank 0 was interrupted")})
            connection.close()
        raise
    finally:
        if file:
            Path(file).unlink(missing_ok=True)
    return accepted


def join(launch: Launch, rendezvous: str, facts: Message, timeout_s: float) -> Connection:
    """Connect to rank 0, and send it the facts of this rank.

    Raises CollectiveError if rank 0 does not answer within ``timeout_s``.
    """
    file, host, first_port = _find_target(launch, rendezvous)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        addresses = [(host, first_port + number, "") for number in range(_TRIED_PORTS)]
        if file:
            # The file does not exist or is incomplete until rank 0 has written it.
            addresses = []
            with suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(Path(file).read_text(encoding="utf-8"))
                host = content["host"] if content["host"] != socket.gethostname() else "127.0.0.1"
                addresses = [(host, int(content["port"]), str(content["token"]))]
        for address_host, port, token in addresses:
            if connection := _try_to_join(address_host, port, launch, facts | {"token": token}):
                return connection
        time.sleep(_RETRY_S)
    raise CollectiveError(
        f"rank {launch.rank}: rank 0 did not answer at {file or f'{host}:{first_port}'} "
        f"within {timeout_s:g} s",
        hint=_START_HINT,
    )


def _find_target(launch: Launch, rendezvous: str) -> tuple[str, str, int]:
    """Return where the ranks meet: a file, or "" with the host and the first port that rank 0 tries.

    With a file, the port is 0, which is any free port.
    """
    if rendezvous:
        address = parse_address(rendezvous)
        return ("", *address) if address else (rendezvous, "", 0)
    if not launch.host:
        raise InputError(
            f"{launch.launcher} does not tell on which host rank 0 runs",
            hint="add --rendezvous HOST:PORT, or set MASTER_ADDR and MASTER_PORT",
        )
    return "", launch.host, launch.port


def _listen(host: str, first_port: int) -> socket.socket:
    """Listen at a port, or at one of the next ports if that port is taken.

    Rank 0 listens on all network interfaces unless its address is that of the loopback interface: the
    name of a host often stands for another address on the host itself.
    """
    interface = host if host in _LOOPBACK_HOSTS else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error = OSError()
    for port in range(first_port, first_port + _TRIED_PORTS) if first_port else (0,):
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
    expected = {
        "greeting": _GREETING,
        "job": launch.job,
        "ranks": launch.rank_count,
        "token": token,
    }
    try:
        hello = connection.receive(_HELLO_TIMEOUT_S)
        if hello is None or hello.get("rank") not in range(1, launch.rank_count):
            return None
        if any(hello.get(name) != value for name, value in expected.items()):
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


# --- ranks in other processes -----------------------------------------------------------------------


def process_facts(
    version: str, options: Mapping[str, str], variables: Mapping[str, str]
) -> Message:
    """Return the identity of this process, and the version and options that must be equal in all ranks."""
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "version": version,
        "options": dict(options),
        "variables": {name: text for name, text in variables.items() if name.startswith("NCCL_")},
    }


def check_same_options(rank_0_facts: Message, facts: Message, rank: int) -> None:
    """Raise InputError if a rank was started with another version or other options than rank 0."""
    if facts["version"] != rank_0_facts["version"]:
        raise InputError(
            f"rank {rank} on {facts['host']} has cudakit {facts['version']}, "
            f"rank 0 on {rank_0_facts['host']} has {rank_0_facts['version']}",
            hint="install the same version on all hosts",
        )
    rank_0_options, options = rank_0_facts["options"], facts["options"]
    for name in sorted(rank_0_options.keys() | options.keys()):
        rank_0_value, value = rank_0_options.get(name), options.get(name)
        if value != rank_0_value:
            raise InputError(
                f"rank {rank} on {facts['host']} has {name} = {value}, rank 0 has {rank_0_value}",
                hint="start all ranks with the same options",
            )


class RemoteChannel:
    """A rank in another process."""

    def __init__(self, connection: Connection, rank: int, answers: Answers, facts: Message) -> None:
        self.name = f"rank {rank} ({facts['host']}, process {facts['process']})"

        def read_messages() -> None:
            message: Message | None = {}
            while message is not None:
                try:
                    message = connection.receive()
                except ValueError:
                    message = None
                answers.put((rank, message))

        self._connection = connection
        self._reader = threading.Thread(target=read_messages, name=f"rank {rank}", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        with suppress(OSError):  # The thread that receives messages reports the end of the rank.
            self._connection.send(message)

    def abort(self, reason: str) -> None:
        self.send({_ENDED: reason})

    def close(self) -> None:
        self._reader.join(END_TIMEOUT_S)
        self._connection.close()


def serve_rank(
    launch: Launch,
    rendezvous: str,
    facts: Message,
    open_gpu: Callable[[], Gpu],
    timeout_s: float,
) -> None:
    """Execute the requests of rank 0 in this process, until rank 0 ends the measurement.

    Raises CollectiveError if another rank fails or rank 0 ends.
    """

    def answer(rank_and_message: tuple[int, Message]) -> None:
        with suppress(OSError):  # The main thread reports the end of rank 0.
            connection.send(rank_and_message[1])

    with closing(join(launch, rendezvous, facts, timeout_s)) as connection:
        rank = Rank(open_gpu, launch.rank, launch.rank_count, answer)
        reason = ""
        while not reason:
            try:
                message = connection.receive()
            except ValueError as error:
                message = {_ENDED: f"rank 0 sent no message, but other data: {error}"}
            if message is None:
                reason = "rank 0 ended"
            elif _ENDED in message:
                reason = str(message[_ENDED])
            else:
                rank.send(message)
                if message.get(REQUEST) == CLOSE:
                    rank.close()
                    return
        rank.abort(reason)
        rank.close()
    raise CollectiveError(f"rank {launch.rank} stopped: {reason}")
