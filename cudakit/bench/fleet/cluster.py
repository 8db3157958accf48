"""The hosts of a Ray cluster, and tasks on chosen hosts. Ray places, transports and repeats the tasks."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from cudakit.bench.fleet.result import FleetRecords, HostFacts, parse_facts
from cudakit.bench.pipeline import Progress
from cudakit.errors import EnvironmentUnusable, InputError, MissingDependency, UsageError

# A generator function that runs on a host; each yielded text arrives here.
HostFunction: TypeAlias = Callable[..., Iterator[str]]
FailureKind: TypeAlias = Literal["host", "import", "process", "exception"]

LOCAL, AUTO = "local", "auto"
EXTRA = "cudakit[fleet]"
# Number of times that Ray repeats a task whose process or host died.
_MAX_RETRIES = 1
# Number of CPUs of a local cluster, which starts a worker process per CPU. Tasks reserve GPUs only, and run
# one at a time.
_LOCAL_CPUS = 1
_LOCAL_STORE_BYTES = 80 << 20  # Ray needs at least 75 MiB.
# Maximum length of a local cluster's directory: the paths of Ray's sockets in the directory are about 65
# characters longer, and a socket address holds 107 characters (unix(7)).
_MAX_DIRECTORY_LENGTH = 40
_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 20.0
# Time in which a text that a task sent must arrive from its host.
_TEXT_TIMEOUT_S = 60.0
# Time between two checks that the head of the cluster answers, and number of failed checks after which the
# connection is lost. Ray would end this process without a report after 60 s.
_HEAD_CHECK_S, _MAX_FAILED_CHECKS = 5.0, 3
# This program connects to a cluster; if it cannot, it prints Ray's reason and exits with 1.
_CONNECT_PROGRAM = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    sys.exit(print(error) or 1)
"""
_ADDRESS_HINT = (
    "ray status --address HOST:PORT shows whether a cluster answers; --ray local needs no cluster"
)
# Ray's reason, in ray.init, if --ray auto finds no cluster. The rest of the reason names options of Ray.
_NO_CLUSTER_REASON = "Could not find any running Ray instance"
_NO_CLUSTER_HINT = (
    "--ray HOST:PORT connects to a cluster whose head is another host; --ray local needs no cluster"
)
# With this setting, Ray does not change CUDA_VISIBLE_DEVICES for tasks without GPUs. Ray announces the change
# of its default with a FutureWarning.
_SETTINGS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """One host of a Ray cluster."""

    name: str  # Host name; with the address or node id appended if other hosts have the same name.
    address: str  # IP address in the cluster.
    node_id: str  # Ray's id of the node.
    gpu_count: int  # Number of GPUs that the host offers to Ray.


class TaskFailure(Exception):
    """A task ended without its result.

    ``kind`` is "host" if the host left the cluster, "import" if cudakit is missing there, "process" if the
    process of the task died, or "exception" if the task raised one.
    """

    def __init__(self, kind: FailureKind, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class RayTask:
    """A running task, whose texts arrive one by one."""

    def __init__(self, ray: Any, generator: Any) -> None:
        self._ray = ray
        self.generator = generator

    def next_text(self) -> str:
        """Return the next text of the task. Raises TaskFailure if the task ended without one."""
        try:
            return str(self._ray.get(next(self.generator), timeout=_TEXT_TIMEOUT_S))
        except StopIteration:
            raise TaskFailure("process", "the task ended without a result") from None
        except self._ray.exceptions.RayError as error:
            raise _failure(self._ray.exceptions, error) from error

    def cancel(self) -> None:
        try:
            self._ray.cancel(self.generator, force=True)
        except self._ray.exceptions.RayError:
            return  # The task has ended already.


class RayCluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._head_address = str(ray.get_runtime_context().gcs_address)
        self._next_check_s = 0.0  # Time of the monotonic clock of the next check of the head.
        self._failed_check_count = 0  # Number of failed checks since the last successful one.

    def hosts(self) -> tuple[ClusterHost, ...]:
        """Return the hosts that are alive, by name."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        names = distinct_names(
            [
                (node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
                for node in nodes
            ]
        )
        hosts = (
            ClusterHost(
                name,
                node["NodeManagerAddress"],
                node["NodeID"],
                int(node["Resources"].get("GPU", 0)),
            )
            for name, node in zip(names, nodes, strict=True)
        )
        return tuple(sorted(hosts, key=lambda host: host.name))

    def submit(
        self, function: HostFunction, host: ClusterHost, *arguments: object, gpus: int
    ) -> RayTask:
        """Start a function on a host, in a separate process, once ``gpus`` GPUs of the host are free."""
        placement = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            host.node_id, soft=False
        )
        remote_function = self._ray.remote(
            num_returns="streaming",
            num_gpus=gpus,
            num_cpus=0,
            max_calls=1,
            max_retries=_MAX_RETRIES,
            scheduling_strategy=placement,
        )(function)
        return RayTask(self._ray, remote_function.remote(*arguments))

    def wait(self, tasks: Sequence[RayTask], timeout_s: float) -> list[RayTask]:
        """Wait until a task sent text or ended, or until the timeout; return all such tasks.

        Raises EnvironmentUnusable if the connection to the cluster is lost.
        """
        self._check_head()
        try:
            ready_generators, _ = self._ray.wait(
                [task.generator for task in tasks],
                num_returns=len(tasks),
                timeout=timeout_s,
                fetch_local=False,
            )
        except self._ray.exceptions.RayError as error:
            raise _lost_connection(str(error)) from error
        return [
            task
            for task in tasks
            if any(task.generator is ready_generator for ready_generator in ready_generators)
        ]

    def _check_head(self) -> None:
        """Raise EnvironmentUnusable if the head of the cluster did not answer several times."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _HEAD_CHECK_S
        try:
            _connect_to(self._head_address)
        except OSError as error:
            self._failed_check_count += 1
            if self._failed_check_count >= _MAX_FAILED_CHECKS:
                reason = f"{self._head_address} does not answer: {error.strerror or error}"
                raise _lost_connection(reason) from error
        else:
            self._failed_check_count = 0


def _lost_connection(reason: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"the connection to the Ray cluster was lost: {' '.join(reason.split())}",
        hint="cudakit bench suite --results DIR reports the results so far",
    )


def distinct_names(hosts: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a distinct name per host from host name, address and node id, as short as possible."""
    forms = [(name, f"{name}-{address}", f"{name}-{node[:8]}") for name, address, node in hosts]
    name_counts = Counter(name for name, _, _ in forms)
    address_counts = Counter(with_address for _, with_address, _ in forms)
    return [
        name
        if name_counts[name] == 1
        else with_address
        if address_counts[with_address] == 1
        else with_node
        for name, with_address, with_node in forms
    ]


# --- connecting ------------------------------------------------------------------------------------


@contextmanager
def open_cluster(address: str) -> Iterator[RayCluster]:
    """Connect to the cluster at ``HOST:PORT``, to the one of this machine (auto), or start one (local).

    Raises MissingDependency without Ray, UsageError for an address of Ray Client, and EnvironmentUnusable
    within seconds if the cluster does not answer or has another version of Ray or Python.
    """
    if "://" in address:
        raise UsageError(
            f"{address} is an address of Ray Client, which bench suite does not support",
            hint="run cudakit on a host of the cluster with --ray auto",
        )
    os.environ.update(_SETTINGS)
    if address == LOCAL:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if "RAY_AUTH_MODE" not in os.environ:  # Ray would write a token to ~/.ray.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise MissingDependency("ray", purpose="--ray", requirement=EXTRA) from error
    with ExitStack() as cleanup:
        options: dict[str, Any] = {"address": address}
        if address == LOCAL:
            directory = tempfile.TemporaryDirectory(
                prefix="cudakit-ray-", ignore_cleanup_errors=True
            )
            cleanup.enter_context(directory)
            options |= {
                "num_cpus": _LOCAL_CPUS,
                "object_store_memory": _LOCAL_STORE_BYTES,
                "include_dashboard": False,
            }
            if len(directory.name) <= _MAX_DIRECTORY_LENGTH:
                options["_temp_dir"] = directory.name
        else:
            _check_answer(address)
        cleanup.callback(ray.shutdown)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
            raise connection_error(address, str(error)) from error
        signal.signal(signal.SIGTERM, handler)  # Ray's handler ends the process without a report.
        yield RayCluster(ray)


def _check_answer(address: str) -> None:
    """Raise EnvironmentUnusable if another process cannot connect to the cluster within seconds.

    In this process, ray.init could try for minutes, and would not react to signals meanwhile.
    """
    if address != AUTO:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal()):
            raise UsageError(
                f"{address!r} is not an address of a Ray cluster",
                hint="write --ray HOST:PORT, --ray auto or --ray local",
            )
        try:
            _connect_to(address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EnvironmentUnusable(
                f"the Ray cluster {address} does not answer: {reason}", hint=_ADDRESS_HINT
            ) from error
    try:
        process = subprocess.run(  # noqa: S603 our own program
            [sys.executable, "-P", "-c", _CONNECT_PROGRAM, address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusable(
            f"{_cluster_text(address)} does not answer within {_ANSWER_TIMEOUT_S:.0f} s",
            hint=_ADDRESS_HINT,
        ) from None
    if process.returncode:
        raise connection_error(address, process.stdout or "the process that connects to it died")


def connection_error(address: str, reason: str) -> EnvironmentUnusable:
    """Return the error for Ray's reason not to connect to a cluster or start one."""
    if _NO_CLUSTER_REASON in reason:
        return EnvironmentUnusable("no Ray cluster runs on this machine", hint=_NO_CLUSTER_HINT)
    hint = _ADDRESS_HINT
    if "Version mismatch" in reason:
        hint = "all hosts and this process need the same versions of Ray and Python"
    elif "token" in reason:
        hint = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token of the cluster"
    failure_text = (
        "no local Ray cluster could be started"
        if address == LOCAL
        else f"no connection to {_cluster_text(address)}"
    )
    return EnvironmentUnusable(f"{failure_text}: {' '.join(reason.split())}", hint=hint)


def _cluster_text(address: str) -> str:
    """Return how an error names the cluster of ``--ray``. For ``auto``, Ray reads RAY_ADDRESS first."""
    if address != AUTO:
        return f"the Ray cluster {address}"
    environment_address = os.environ.get("RAY_ADDRESS")
    return (
        f"the Ray cluster {environment_address} of RAY_ADDRESS"
        if environment_address
        else "the Ray cluster of this machine"
    )


def _connect_to(address: str) -> None:
    """Connect to HOST:PORT, and disconnect. Raises OSError, or OverflowError for an impossible port."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


# --- failures --------------------------------------------------------------------------------------


def _failure(exceptions: Any, error: Exception) -> TaskFailure:
    """Return the failure of a task that an exception of Ray describes."""
    text = str(error)
    if isinstance(error, exceptions.GetTimeoutError):
        return TaskFailure("host", f"its result did not arrive within {_TEXT_TIMEOUT_S:.0f} s")
    if isinstance(
        error,
        (
            exceptions.TaskUnschedulableError,
            exceptions.NodeDiedError,
            exceptions.LocalRayletDiedError,
            exceptions.ObjectLostError,
        ),
    ):
        return TaskFailure("host", "the host left the Ray cluster")
    if "failed to import" in text or "No module named 'cudakit" in text:
        return TaskFailure(
            "import",
            "cudakit cannot be imported there, or has another version",
            hint=f"install the same version on every host: pip install '{EXTRA}'",
        )
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        reason = f"{type(cause).__name__}: {cause}" if cause else text.strip().splitlines()[-1]
        return TaskFailure("exception", f"the task failed: {' '.join(reason.split())}")
    if isinstance(error, exceptions.OutOfMemoryError):
        return TaskFailure("process", "Ray ended the process: the host is out of memory")
    return TaskFailure(
        "process",
        f"the process died {1 + _MAX_RETRIES} times",
        hint="see the logs of Ray on the host, in /tmp/ray/session_latest/logs",
    )


# --- Measure all GPUs of a cluster: hosts at the same time, the GPUs of a host one after the other ---
#
# The GPUs of a host share links, host memory and power, so only one is measured at a time. Its task reserves
# all GPUs of the host, because peer copies use them too.

# Time between two checks of the time limits, and of Ctrl-C.
_POLL_S = 0.5
# Time in which the suite of one GPU must end. A quick suite takes about a minute.
_QUICK_LIMIT_S, _FULL_LIMIT_S = 600.0, 3600.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The suite to run on each GPU, the time limit for hosts, and the functions that run on the hosts.

    The functions run in processes of Ray. ``describe`` gets ``arguments``, and yields the JSON document of
    HostFacts. ``measure`` gets the CUDA device index of a GPU, the UUID of the GPU ("" if unknown) and
    ``arguments``. It yields "" when it starts, then the JSON document of the suite.
    """

    simulated: bool  # Whether each host simulates its GPUs.
    quick: bool  # Whether the suite is a quick one.
    timeout_s: float  # Time in which a host must answer, and in which its GPUs must become free.
    describe: HostFunction
    measure: HostFunction
    arguments: tuple[object, ...]


def find_hosts(cluster: RayCluster, *, simulated: bool) -> tuple[ClusterHost, ...]:
    """Return the hosts with GPUs, or all hosts if they simulate GPUs.

    Raises EnvironmentUnusable if no host has a GPU.
    """
    all_hosts = cluster.hosts()
    hosts = tuple(host for host in all_hosts if simulated or host.gpu_count)
    if not hosts:
        raise EnvironmentUnusable(
            f"the Ray cluster has no GPU: {len(all_hosts)} host{'s' * (len(all_hosts) != 1)} without one",
            hint="ray start --num-gpus N offers the GPUs of a host; --gpu sim simulates some",
        )
    return hosts


def measure_fleet(
    cluster: RayCluster,
    hosts: Sequence[ClusterHost],
    records: FleetRecords,
    options: FleetOptions,
    progress: Progress,
) -> bool:
    """Measure all GPUs that have no result in ``records`` yet, and write each result when it arrives.

    A host or GPU that fails has an error in ``records``. Returns False after a KeyboardInterrupt, which
    ``progress`` may raise.
    """
    fleet = _Fleet(cluster, records, options)
    runs = [_HostRun(host) for host in hosts]
    try:
        for run in runs:
            fleet.describe(run)
        while active_runs := [run for run in runs if run.task]:
            waiting_count = sum(run.facts is None for run in active_runs)
            gpu_count = sum(run.gpu_count for run in runs)
            left_count = sum(len(run.waiting_gpus) + (run.gpu is not None) for run in runs)
            measured_count = gpu_count - left_count
            if waiting_count:
                progress(f"waiting for {waiting_count} of {len(runs)} hosts", 0.0)
            else:
                share = measured_count / max(gpu_count, 1)
                progress(f"{measured_count} of {gpu_count} GPUs measured", share)
            fleet.advance(active_runs)
    except KeyboardInterrupt:
        return False
    finally:
        for run in runs:
            if run.task:
                run.task.cancel()
    return True


@dataclass
class _HostRun:
    """The state of the measurement of one host."""

    host: ClusterHost
    task: RayTask | None = None  # Task that runs or waits; None after the last one.
    facts: HostFacts | None = None  # Facts about the host; None until it has answered.
    waiting_gpus: deque[int] = field(default_factory=deque)  # Indices of GPUs to measure.
    gpu: int | None = None  # Index of the GPU whose task runs or waits; None if there is none.
    is_started: bool = False  # Whether the task of ``gpu`` has started.
    deadline_s: float = 0.0  # Time of the monotonic clock at which the task is given up.
    gpu_count: int = 0  # Number of GPUs to measure in this run.


class _Fleet:
    """Starts the tasks of all hosts, and handles failures, time limits and the texts that the tasks yield."""

    def __init__(
        self,
        cluster: RayCluster,
        records: FleetRecords,
        options: FleetOptions,
    ) -> None:
        self._cluster = cluster
        self._records = records
        self._options = options

    def describe(self, run: _HostRun) -> None:
        options = self._options
        run.task = self._cluster.submit(options.describe, run.host, *options.arguments, gpus=0)
        run.deadline_s = time.monotonic() + options.timeout_s

    def advance(self, runs: Sequence[_HostRun]) -> None:
        """Wait briefly for texts of tasks, handle the new texts, and cancel tasks that are too late."""
        tasks = [run.task for run in runs if run.task]
        ready_tasks = self._cluster.wait(tasks, _POLL_S)
        for run in runs:
            if run.task in ready_tasks:
                self._handle_text(run, run.task)
            elif run.task and time.monotonic() > run.deadline_s:
                run.task.cancel()
                self._handle_failure(run, self._late_failure(run))

    def _handle_text(self, run: _HostRun, task: RayTask) -> None:
        try:
            text = task.next_text()
            if run.facts is None:
                facts = parse_facts(json.loads(text), run.host.name)
                run.facts = replace(
                    facts,
                    name=run.host.name,
                    address=run.host.address,
                    gpu_count=facts.gpu_count if self._options.simulated else run.host.gpu_count,
                )
                self._records.write_host(run.facts)
                has_result = partial(self._records.has_result, run.facts, quick=self._options.quick)
                run.waiting_gpus.extend(i for i in range(run.facts.gpu_count) if not has_result(i))
                run.gpu_count = len(run.waiting_gpus)
                self._measure_next(run)
            elif not run.is_started:
                limit_s = _QUICK_LIMIT_S if self._options.quick else _FULL_LIMIT_S
                run.is_started, run.deadline_s = True, time.monotonic() + limit_s
            elif run.gpu is not None:
                self._records.write_suite(run.host.name, run.gpu, text)
                self._measure_next(run)
        except TaskFailure as failure:
            self._handle_failure(run, failure)
        except (InputError, ValueError) as error:
            reason = f"the version of cudakit there differs: {error}"
            self._handle_failure(run, TaskFailure("import", reason))

    def _measure_next(self, run: _HostRun) -> None:
        """Start the task of the next GPU of a host, if there is one."""
        run.gpu = run.waiting_gpus.popleft() if run.waiting_gpus else None
        run.task, run.is_started = None, False
        if run.gpu is None or run.facts is None:
            return
        run.task = self._cluster.submit(
            self._options.measure,
            run.host,
            run.gpu,
            run.facts.gpu_uuid(run.gpu),
            *self._options.arguments,
            gpus=0 if self._options.simulated else run.host.gpu_count,
        )
        run.deadline_s = time.monotonic() + self._options.timeout_s

    def _late_failure(self, run: _HostRun) -> TaskFailure:
        timeout_text = f"{self._options.timeout_s:g} s"
        if run.facts is None:
            return TaskFailure("host", f"no answer within {timeout_text}")
        if not run.is_started:
            return TaskFailure(
                "host",
                f"other work in the Ray cluster used its GPUs for more than {timeout_text}",
                hint="measure it later: --results DIR keeps the results of the others",
            )
        limit_s = _QUICK_LIMIT_S if self._options.quick else _FULL_LIMIT_S
        return TaskFailure("process", f"the suite did not end within {limit_s / 60:.0f} min")

    def _handle_failure(self, run: _HostRun, failure: TaskFailure) -> None:
        """Record a failure of a GPU, and continue with the next one; a failure of a host ends its run."""
        if run.gpu is not None and failure.kind in ("process", "exception"):
            self._records.write_error(run.host.name, run.gpu, failure.message, failure.hint)
            self._measure_next(run)
            return
        facts = run.facts or HostFacts(
            run.host.name,
            run.host.address,
            run.host.gpu_count,
            simulated=self._options.simulated,
        )
        gpu_text = "" if run.gpu is None else f" (at GPU {run.gpu})"
        self._records.write_host(
            replace(facts, error=f"{failure.message}{gpu_text}", hint=failure.hint)
        )
        run.waiting_gpus.clear()
        run.task, run.gpu = None, None
