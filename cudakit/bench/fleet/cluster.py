"""Measure all GPUs of a Ray cluster: hosts at the same time, the GPUs of a host one after the other.

Ray places, transports and repeats the tasks. The GPUs of a host share links, host memory and power, so only
one is measured at a time. Its task reserves all GPUs of the host, because peer copies use them too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from cudakit.bench.fleet.result import FleetRecords, HostFacts, parse_facts
from cudakit.bench.pipeline import Progress
from cudakit.errors import EnvironmentUnusable, InputError, MissingDependency, UsageError

# A generator function that runs on a host; each yielded text arrives here.
HostFunction: TypeAlias = Callable[..., Iterator[str]]

LOCAL, AUTO = "local", "auto"
EXTRA = "cudakit[fleet]"
# Number of times that Ray repeats a task whose process or host died.
_MAX_RETRIES = 1
# Time in which a text that a task sent must arrive from its host.
_TEXT_TIMEOUT_S = 60.0
# Time between two checks of the time limits, and of Ctrl-C.
_POLL_S = 0.5
# Time without an answer of the head after which the connection is lost. Ray would end this process without a
# report after 60 s.
_MAX_SILENCE_S = 12.0
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


def find_hosts(ray: ModuleType, *, simulated: bool) -> dict[str, HostFacts]:
    """Return what Ray knows of the hosts with GPUs, or of all hosts if they simulate GPUs, by node id.

    Raises EnvironmentUnusable if no host has a GPU.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = distinct_names(
        [
            (node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
            for node in nodes
        ]
    )
    hosts = {
        node["NodeID"]: HostFacts(
            name,
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            simulated=simulated,
        )
        for name, node in sorted(zip(names, nodes, strict=True), key=lambda named: named[0])
        if simulated or int(node["Resources"].get("GPU", 0))
    }
    if not hosts:
        raise EnvironmentUnusable(
            f"the Ray cluster has no GPU: {len(nodes)} host{'s' * (len(nodes) != 1)} without one",
            hint="ray start --num-gpus N offers the GPUs of a host; --gpu sim simulates some",
        )
    return hosts


def distinct_names(hosts: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a distinct name per host from host name, address and node id, as short as possible."""
    forms = [(name, f"{name}-{address}", f"{name}-{node[:8]}") for name, address, node in hosts]
    counts = Counter(form for host_forms in forms for form in host_forms[:2])
    return [next((form for form in it[:2] if counts[form] == 1), it[2]) for it in forms]


def measure_fleet(
    ray: ModuleType,
    hosts: Mapping[str, HostFacts],
    records: FleetRecords,
    options: FleetOptions,
    progress: Progress,
) -> bool:
    """Measure all GPUs that have no result in ``records`` yet, and write each result when it arrives.

    A host or GPU that fails has an error in ``records``. Returns False after a KeyboardInterrupt, which
    ``progress`` may raise. Raises EnvironmentUnusable if the connection to the cluster is lost.
    """
    fleet = _Fleet(ray, records, options)
    # What each host waits for; a host whose measurement has ended is removed.
    awaited = {run: next(run) for run in (fleet.measure_host(*host) for host in hosts.items())}
    head_address, lost_s = str(ray.get_runtime_context().gcs_address), math.inf
    try:
        while awaited:
            if waiting_count := len(hosts) - len(fleet.left_counts):
                progress(f"waiting for {waiting_count} of {len(hosts)} hosts", 0.0)
            else:
                gpu_count = fleet.gpu_count
                measured_count = gpu_count - sum(fleet.left_counts.values())
                text = f"{measured_count} of {gpu_count} GPUs measured"
                progress(text, measured_count / max(gpu_count, 1))
            try:
                _connect_to(head_address)
                lost_s = math.inf
            except OSError as error:
                lost_s = min(lost_s, time.monotonic() + _MAX_SILENCE_S)
                if time.monotonic() > lost_s:
                    reason = f"{head_address} does not answer: {error.strerror or error}"
                    raise _lost_connection(reason) from error
            tasks = [it.task for it in awaited.values()]
            try:
                ready, _ = ray.wait(
                    tasks, num_returns=len(tasks), timeout=_POLL_S, fetch_local=False
                )
            except ray.exceptions.RayError as error:
                raise _lost_connection(str(error)) from error
            for run, it in list(awaited.items()):
                try:
                    if any(it.task is task for task in ready):
                        awaited[run] = fleet.resume(run, it.task)
                    elif time.monotonic() > it.deadline_s:
                        _cancel(ray, it.task)
                        awaited[run] = run.throw(it.late_failure)
                except StopIteration:
                    del awaited[run]
    except KeyboardInterrupt:
        return False
    finally:
        for it in awaited.values():
            _cancel(ray, it.task)
    return True


class _TaskFailure(Exception):
    """A task ended without its result.

    ``ends_host`` tells that the host has left the cluster or cannot run cudakit; else, the process of the
    task died, or the task raised an exception.
    """

    def __init__(self, message: str, *, hint: str = "", ends_host: bool) -> None:
        super().__init__(message)
        self.message, self.hint, self.ends_host = message, hint, ends_host


class _Awaited(NamedTuple):
    """The task whose next text the measurement of a host waits for."""

    task: Any  # Ray's generator of the texts.
    deadline_s: float  # Time of the monotonic clock at which the task is given up.
    late_failure: _TaskFailure


# The measurement of a host yields the task that it waits for, and receives the next text of the task, or a
# _TaskFailure.
_HostRun: TypeAlias = Generator[_Awaited, str, None]


class _Fleet:
    """Measures each host in a generator of its own, and counts the GPUs for the progress."""

    def __init__(self, ray: ModuleType, records: FleetRecords, options: FleetOptions) -> None:
        self._ray, self._records, self._options = ray, records, options
        self.gpu_count = 0  # Number of GPUs to measure, on the hosts that have answered.
        # Number of GPUs that are not measured yet, by the name of each host that has answered or failed.
        self.left_counts: dict[str, int] = {}

    def measure_host(self, node_id: str, facts: HostFacts) -> _HostRun:
        """Write the facts about a host, and measure its GPUs. A failure of a GPU does not end the host."""
        options, records = self._options, self._records
        timeout_text, offered_count, index = f"{options.timeout_s:g} s", facts.gpu_count, None
        try:
            task = self._submit(options.describe, node_id, *options.arguments, gpus=0)
            late = _TaskFailure(f"no answer within {timeout_text}", ends_host=True)
            text = yield _Awaited(task, time.monotonic() + options.timeout_s, late)
            try:
                answer = parse_facts(json.loads(text), facts.name)
            except (InputError, ValueError) as error:
                reason = f"the version of cudakit there differs: {error}"
                raise _TaskFailure(reason, ends_host=True) from error
            gpu_count = answer.gpu_count if options.simulated else offered_count
            facts = replace(answer, name=facts.name, address=facts.address, gpu_count=gpu_count)
            records.write_host(facts)
            indices = [
                i for i in range(gpu_count) if not records.has_result(facts, i, quick=options.quick)
            ]
            self.gpu_count += len(indices)
            limit_s = _QUICK_LIMIT_S if options.quick else _FULL_LIMIT_S
            for number, index in enumerate(indices):
                self.left_counts[facts.name] = len(indices) - number
                try:
                    task = self._submit(
                        options.measure,
                        node_id,
                        index,
                        facts.gpu_uuid(index),
                        *options.arguments,
                        gpus=0 if options.simulated else offered_count,
                    )
                    late = _TaskFailure(
                        f"other work in the Ray cluster used its GPUs for more than {timeout_text}",
                        hint="measure it later: --results DIR keeps the results of the others",
                        ends_host=True,
                    )
                    yield _Awaited(task, time.monotonic() + options.timeout_s, late)
                    late = _TaskFailure(
                        f"the suite did not end within {limit_s / 60:.0f} min", ends_host=False
                    )
                    text = yield _Awaited(task, time.monotonic() + limit_s, late)
                    records.write_suite(facts.name, index, text)
                except _TaskFailure as failure:
                    if failure.ends_host:
                        raise
                    records.write_error(facts.name, index, failure.message, failure.hint)
        except _TaskFailure as failure:
            gpu_text = "" if index is None else f" (at GPU {index})"
            reason = f"{failure.message}{gpu_text}"
            records.write_host(replace(facts, error=reason, hint=failure.hint))
        self.left_counts[facts.name] = 0

    def resume(self, run: _HostRun, task: Any) -> _Awaited:
        """Continue the measurement of a host with the next text of its task, or the failure of the task."""
        ray = self._ray
        try:
            text = str(ray.get(next(task), timeout=_TEXT_TIMEOUT_S))
        except StopIteration:
            failure = _TaskFailure("the task ended without a result", ends_host=False)
            return run.throw(failure)
        except ray.exceptions.RayError as error:
            return run.throw(_failure(ray.exceptions, error))
        return run.send(text)

    def _submit(self, function: HostFunction, node_id: str, *arguments: object, gpus: int) -> Any:
        """Start a function on a host, in a separate process, once ``gpus`` GPUs of the host are free."""
        placement = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id, soft=False
        )
        remote_function = self._ray.remote(
            num_returns="streaming",
            num_gpus=gpus,
            num_cpus=0,
            max_calls=1,
            max_retries=_MAX_RETRIES,
            scheduling_strategy=placement,
        )(function)
        return remote_function.remote(*arguments)


def _cancel(ray: ModuleType, task: Any) -> None:
    with suppress(ray.exceptions.RayError):  # The task may have ended already.
        ray.cancel(task, force=True)


def _failure(exceptions: Any, error: Exception) -> _TaskFailure:
    """Return the failure of a task that an exception of Ray describes."""
    text = str(error)
    if isinstance(error, exceptions.GetTimeoutError):
        reason = f"its result did not arrive within {_TEXT_TIMEOUT_S:.0f} s"
        return _TaskFailure(reason, ends_host=True)
    if isinstance(
        error,
        (
            exceptions.TaskUnschedulableError,
            exceptions.NodeDiedError,
            exceptions.LocalRayletDiedError,
            exceptions.ObjectLostError,
        ),
    ):
        return _TaskFailure("the host left the Ray cluster", ends_host=True)
    if "failed to import" in text or "No module named 'cudakit" in text:
        return _TaskFailure(
            "cudakit cannot be imported there, or has another version",
            hint=f"install the same version on every host: pip install '{EXTRA}'",
            ends_host=True,
        )
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        reason = f"{type(cause).__name__}: {cause}" if cause else text.strip().splitlines()[-1]
        return _TaskFailure(f"the task failed: {' '.join(reason.split())}", ends_host=False)
    if isinstance(error, exceptions.OutOfMemoryError):
        reason = "Ray ended the process: the host is out of memory"
        return _TaskFailure(reason, ends_host=False)
    return _TaskFailure(
        f"the process died {1 + _MAX_RETRIES} times",
        hint="see the logs of Ray on the host, in /tmp/ray/session_latest/logs",
        ends_host=False,
    )


def _lost_connection(reason: str) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"the connection to the Ray cluster was lost: {' '.join(reason.split())}",
        hint="cudakit bench suite --results DIR reports the results so far",
    )


# --- connecting ------------------------------------------------------------------------------------

# Maximum length of a local cluster's directory: the paths of Ray's sockets in the directory are about 65
# characters longer, and a socket address holds 107 characters (unix(7)).
_MAX_DIRECTORY_LENGTH = 40
_CONNECT_TIMEOUT_S = 3.0
_MAX_ANSWER_S = 20.0
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


@contextmanager
def open_cluster(address: str, timeout_s: float) -> Iterator[ModuleType]:
    """Connect to the cluster at ``HOST:PORT``, to the one of this machine (auto), or start one (local).

    Raises MissingDependency without Ray, UsageError for an address of Ray Client, and EnvironmentUnusable
    within ``timeout_s`` (at most 20 s) if it does not answer or has another version of Ray or Python.
    """
    if "://" in address:
        raise UsageError(
            f"{address} is an address of Ray Client, which bench suite does not support",
            hint="run cudakit on a host of the cluster with --ray auto",
        )
    # Ray must not change CUDA_VISIBLE_DEVICES for tasks without GPUs. Ray announces the change of its default
    # with a FutureWarning.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
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
            directory = cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="cudakit-ray-", ignore_cleanup_errors=True)
            )
            options |= {
                # Ray starts a worker process per CPU. Tasks reserve GPUs only, and run one at a time.
                "num_cpus": 1,
                "object_store_memory": 80 << 20,  # Ray needs at least 75 MiB.
                "include_dashboard": False,
            }
            if len(directory) <= _MAX_DIRECTORY_LENGTH:
                options["_temp_dir"] = directory
        else:
            _check_answer(address, min(timeout_s, _MAX_ANSWER_S))
        cleanup.callback(ray.shutdown)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
            raise connection_error(address, str(error)) from error
        signal.signal(signal.SIGTERM, handler)  # Ray's handler ends the process without a report.
        yield ray


def _check_answer(address: str, timeout_s: float) -> None:
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
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnusable(
            f"{_cluster_text(address)} does not answer within {timeout_s:g} s",
            hint=_ADDRESS_HINT,
        ) from None
    if process.returncode:
        raise connection_error(address, process.stdout or "the process that connects to it died")


def connection_error(address: str, reason: str) -> EnvironmentUnusable:
    """Return the error for Ray's reason not to connect to a cluster or start one."""
    # Ray's reason with --ray auto. The rest of the reason names options of Ray.
    if "Could not find any running Ray instance" in reason:
        return EnvironmentUnusable(
            "no Ray cluster runs on this machine",
            hint="--ray HOST:PORT connects to a cluster whose head is another host; "
            "--ray local needs no cluster",
        )
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
