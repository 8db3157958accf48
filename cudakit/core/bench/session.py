"""A session: all the cases of a Spec, measured on one device, verified and concluded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median

from cudakit.core.bench.blocker import hindrance
from cudakit.core.bench.case import Case, check_fit
from cudakit.core.bench.concerns import concerns
from cudakit.core.bench.environment import Environment, environment
from cudakit.core.bench.limits import Fields, Limit, limit
from cudakit.core.bench.measured import Measured
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import BenchResult, CaseResult, case_result
from cudakit.core.bench.runner import Progress, measure
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.spec import Spec
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.verification import NOTHING_TO_VERIFY, Verification
from cudakit.core.bench.workloads import WORKLOADS
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.units import Unavailable

# Of the time that a case may take, the warm-up at most this share.
_WARMUP_SHARE = 0.25
_NO_VALUES = Unavailable("it computes no values")
_NOTHING_KEPT = "no sample could be kept: there is no figure"
_NOT_ASKED = Unavailable("nobody was there to ask")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a device cannot say of itself: who else is there, and what is around it."""

    versions: Mapping[str, str] = field(default_factory=dict)  # driver, CUDA, libraries, cudakit
    management: DeviceFacts | None = None  # what NVML knows of the device
    other_processes: int | Unavailable = _NOT_ASKED  # on the GPU
    host: Mapping[str, str] = field(default_factory=dict)  # CPU, NUMA node, container
    variables: Mapping[str, str] = field(default_factory=dict)  # the process environment
    command: tuple[str, ...] = ()  # what was called


def run(
    spec: Spec,
    gpu: Gpu,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
    *,
    circumstances: Circumstances | None = None,
    cases: Sequence[Case] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> BenchResult:
    """Measure what a Spec asks for; ``cases`` are measured instead of those that it makes.

    What is wrong has no figures. An interrupt leaves what was measured by then, and goes on where that is
    nothing. Raises InputError for what does not fit in memory, before anything is allocated, and what
    workloads and device raise.
    """
    begin_ns = now_ns()
    cases = WORKLOADS[spec.bench](spec, gpu) if cases is None else cases
    check_fit(cases, gpu.memory_info().free_bytes)
    session = _Session(spec, gpu, circumstances or Circumstances())
    complete = session.measure(cases, progress)
    return BenchResult(
        simulated=gpu.simulated,
        bench=spec.bench,
        time_ns=begin_ns,
        complete=complete,
        warnings=tuple(session.warnings()),
        results=tuple(session.results),
    )


class _Session:
    """What has been measured so far."""

    def __init__(self, spec: Spec, gpu: Gpu, circumstances: Circumstances) -> None:
        self.results: list[CaseResult] = []
        self._spec, self._gpu, self._circumstances = spec, gpu, circumstances
        self._facts = gpu.facts()
        self._notes: dict[str, list[str]] = {}

    def measure(self, cases: Sequence[Case], progress: Progress) -> bool:
        """Measure one case after the other; True means that none is missing."""
        try:
            with closing(Timer(self._gpu)) as timer:
                begin_s = timer.now_s()
                for at, case in enumerate(cases):
                    share_s = self._share_s(timer.now_s() - begin_s, len(cases) - at)
                    part = _part(progress, at, len(cases))
                    if self._measure_one(timer, case, share_s, part):
                        return False
        except KeyboardInterrupt:
            if not self.results:
                raise
            return False
        return True

    def warnings(self) -> Iterator[str]:
        """Say what should make a reader doubt the figures, each thing once."""
        yield from dict.fromkeys(
            sentence for case in self.results for sentence in concerns(case.environment)
        )
        for note, titles in self._notes.items():
            others = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
            yield f"{note} ({titles[0]}{others})"

    def _measure_one(
        self, timer: Timer, case: Case, share_s: float | None, progress: Progress
    ) -> bool:
        """Measure a case; True means that the user broke it off."""
        method = _within(self._method(case.method), share_s)
        found = measure(timer, [case.workload], method, seed=self._spec.seed, progress=progress)
        if not found:
            self._remember(case, [_NOTHING_KEPT])
        for measured in found:
            self.results.append(self._conclude(case, measured))
            self._remember(case, measured.notes)
        return any(measured.interrupted for measured in found)

    def _remember(self, case: Case, notes: Iterable[str]) -> None:
        for note in notes:
            self._notes.setdefault(note, []).append(case.title)

    def _method(self, method: Method) -> Method:
        """Do without the blocker, where it would only wait for its watchdog."""
        hindered = hindrance(self._circumstances.variables)
        return replace(method, blocker=False) if hindered else method

    def _share_s(self, elapsed_s: float, cases: int) -> float | None:
        """Give each case that is left an equal share of the time that is left."""
        budget_s = self._spec.budget_s
        return None if budget_s is None else (budget_s - elapsed_s) / cases

    def _conclude(self, case: Case, measured: Measured) -> CaseResult:
        machine = self._environment(measured)
        return case_result(
            measured.name,
            measured.axes,
            measured.samples,
            method=measured.method,
            environment=machine,
            limit=self._limit(case, measured.samples),
            verification=_verification(measured),
            operations=measured.operations,
            bytes_moved=measured.bytes_moved,
            energy_j=measured.energy_j,
        )

    def _environment(self, measured: Measured) -> Environment:
        around = self._circumstances
        return environment(
            self._facts,
            simulated=self._gpu.simulated,
            versions=around.versions,
            management=around.management,
            before=measured.before,
            after=measured.after,
            other_processes=around.other_processes,
            host=around.host,
            variables=around.variables,
            command=around.command,
        )

    def _limit(self, case: Case, samples: Samples) -> Limit | Unavailable:
        if isinstance(case.work, Unavailable):
            return case.work
        clocks = samples.sm_clock_hz
        clock = median(clocks) if clocks else Unavailable("the clock was not measured")
        return limit(case.work, self._fields, clock)

    @property
    def _fields(self) -> Fields:
        managed = self._circumstances.management
        return {**(managed.fields if managed else {}), **self._facts.fields}


def _verification(measured: Measured) -> Verification | Unavailable:
    found = measured.verification
    return _NO_VALUES if found is NOTHING_TO_VERIFY else found


def _part(progress: Progress, at: int, count: int) -> Progress:
    """Tell of the progress of one case as that of all."""
    return lambda stage, fraction: progress(stage, (at + fraction) / count)


def _within(method: Method, share_s: float | None) -> Method:
    """Shorten a method to a time; the least number of samples is taken in any case."""
    if share_s is None:
        return method
    share_s = max(share_s, 1e-3)
    warmup_s = min(method.warmup_s, _WARMUP_SHARE * share_s)
    timeout_s = min(method.rule.timeout_s, share_s - warmup_s)
    rule = replace(
        method.rule, timeout_s=timeout_s, min_time_s=min(method.rule.min_time_s, timeout_s / 2)
    )
    return replace(method, warmup_s=warmup_s, rule=rule)
