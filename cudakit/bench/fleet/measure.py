"""Measure all GPUs of a cluster: hosts at the same time, the GPUs of a host one after the other.

The GPUs of a host share links, host memory and power, so only one is measured at a time. Its task reserves
all GPUs of the host, because peer copies use them too.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cudakit.bench.fleet.ray_cluster import (
    ClusterHost,
    HostFunction,
    RayCluster,
    RayTask,
    TaskFailure,
)
from cudakit.bench.fleet.records import FleetRecords, parse_facts
from cudakit.bench.fleet.result import HostFacts
from cudakit.bench.prepare import Progress
from cudakit.errors import EnvironmentUnusable, InputError

# Time between two checks of the time limits, and of Ctrl-C.
_POLL_S = 0.5
# Time in which the suite of one GPU must end. A quick suite takes about a minute.
_QUICK_LIMIT_S, _FULL_LIMIT_S = 600.0, 3600.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The suite to run on each GPU, and the time limit for hosts."""

    simulated: bool  # Whether each host simulates its GPUs.
    quick: bool  # Whether the suite is a quick one.
    timeout_s: float  # Time in which a host must answer, and in which its GPUs must become free.
    function_arguments: tuple[object, ...]  # Further arguments of the functions that run on a host.


@dataclass(frozen=True, slots=True)
class HostFunctions:
    """The functions that run on the hosts, in processes of Ray.

    ``describe`` gets FleetOptions.function_arguments, and yields the JSON document of HostFacts.
    ``measure`` gets the CUDA device index of a GPU, the UUID of the GPU ("" if unknown) and
    FleetOptions.function_arguments. It yields "" when it starts, then the JSON document of the suite.
    """

    describe: HostFunction
    measure: HostFunction


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
    functions: HostFunctions,
    progress: Progress,
) -> bool:
    """Measure all GPUs that have no result in ``records`` yet, and write each result when it arrives.

    A host or GPU that fails has an error in ``records``. Returns False after a KeyboardInterrupt, which
    ``progress`` may raise.
    """
    fleet = _Fleet(cluster, records, options, functions)
    runs = [_HostRun(host) for host in hosts]
    try:
        for run in runs:
            fleet.describe(run)
        while active_runs := [run for run in runs if run.task]:
            progress(*_describe_progress(runs))
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


def _describe_progress(runs: Sequence[_HostRun]) -> tuple[str, float]:
    """Return a stage, such as "3 of 8 GPUs measured", and the completed fraction."""
    waiting_hosts = [run.host for run in runs if run.task and run.facts is None]
    if waiting_hosts:
        return f"waiting for {len(waiting_hosts)} of {len(runs)} hosts", 0.0
    gpu_count = sum(run.gpu_count for run in runs)
    remaining_count = sum(len(run.waiting_gpus) + (run.gpu is not None) for run in runs)
    measured_count = gpu_count - remaining_count
    return f"{measured_count} of {gpu_count} GPUs measured", measured_count / max(gpu_count, 1)


class _Fleet:
    """Starts the tasks of all hosts, and handles failures, time limits and the texts that the tasks yield."""

    def __init__(
        self,
        cluster: RayCluster,
        records: FleetRecords,
        options: FleetOptions,
        functions: HostFunctions,
    ) -> None:
        self._cluster = cluster
        self._records = records
        self._options = options
        self._functions = functions

    def describe(self, run: _HostRun) -> None:
        """Ask a host for its facts."""
        function_arguments = self._options.function_arguments
        run.task = self._cluster.submit(
            self._functions.describe, run.host, *function_arguments, gpus=0
        )
        run.deadline_s = time.monotonic() + self._options.timeout_s

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
                self._handle_facts(run, parse_facts(json.loads(text), run.host.name))
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

    def _handle_facts(self, run: _HostRun, facts: HostFacts) -> None:
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

    def _measure_next(self, run: _HostRun) -> None:
        """Start the task of the next GPU of a host, if there is one."""
        run.gpu = run.waiting_gpus.popleft() if run.waiting_gpus else None
        run.task, run.is_started = None, False
        if run.gpu is None or run.facts is None:
            return
        run.task = self._cluster.submit(
            self._functions.measure,
            run.host,
            run.gpu,
            run.facts.gpu_uuid(run.gpu),
            *self._options.function_arguments,
            gpus=0 if self._options.simulated else run.host.gpu_count,
        )
        run.deadline_s = time.monotonic() + self._options.timeout_s

    def _late_failure(self, run: _HostRun) -> TaskFailure:
        """Return the failure of a task that is too late."""
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
