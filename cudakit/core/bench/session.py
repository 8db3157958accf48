"""A session: all the cases of a Spec, measured on one device, verified and concluded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from cudakit.core.bench.blocker import hindrance
from cudakit.core.bench.budget import within
from cudakit.core.bench.case import Case, check_fit
from cudakit.core.bench.concerns import concerns_of, environments
from cudakit.core.bench.conclusions import Conclusions
from cudakit.core.bench.contenders import contend, contenders_of
from cudakit.core.bench.graph_costs import graph_costs
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.core.bench.runner import Progress
from cudakit.core.bench.spec import Spec
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.workloads import WORKLOADS
from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.run_context import RunContext

# Bits that do not change cost no energy: the clock stays higher than with data of any use.
_TAME = ("zeros", "ones")
_NOTHING_KEPT = "no sample could be kept: there is no figure"


def run(
    spec: Spec,
    gpu: Gpu,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
    *,
    run_context: RunContext | None = None,
    cases: Sequence[Case] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> BenchResult:
    """Measure what a Spec asks for; ``cases`` are measured instead of those that it makes.

    What is wrong has no figures, and neither has what one of several libraries or types does not offer. An
    interrupt leaves what was measured by then, and goes on where that is nothing. Raises InputError for what
    does not fit in memory, before anything is allocated, Unsupported where nothing can be measured, and what
    else workloads and device raise.
    """
    begin_ns = now_ns()
    cases = WORKLOADS[spec.bench](spec, gpu) if cases is None else cases
    run_context = run_context or RunContext()
    check_fit(cases, gpu.memory_info().free_bytes, run_context.host.available_bytes)
    session = _Session(spec, gpu, run_context)
    complete = session.measure(cases, progress)
    return BenchResult(
        simulated=gpu.simulated,
        bench=spec.bench,
        time_ns=begin_ns,
        complete=complete,
        warnings=tuple(session.warnings()),
        results=tuple(session.results),
        graphs=graph_costs(session.results),
    )


class _Session:
    """What has been measured so far."""

    def __init__(self, spec: Spec, gpu: Gpu, run_context: RunContext) -> None:
        self.results: list[CaseResult] = []
        self._spec, self._gpu, self._run_context = spec, gpu, run_context
        self._conclusions = Conclusions(gpu, run_context)
        self._notes: dict[str, list[str]] = {}
        self._refusals: list[Unsupported] = []

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
        if self._refusals and len(self._refusals) == len(self.results):
            raise self._refusals[0]
        return True

    def warnings(self) -> Iterator[str]:
        """Say what should make a reader doubt the figures, each thing once."""
        yield from concerns_of(environments(self.results))
        for fill in dict.fromkeys(case.method.fill for case in self.results):
            if fill in _TAME:
                yield f"{fill} draw less power than other data, so that figures are better than in use"
        for note, titles in self._notes.items():
            others = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
            yield f"{note} ({titles[0]}{others})"

    def _measure_one(
        self, timer: Timer, case: Case, share_s: float | None, progress: Progress
    ) -> bool:
        """Measure a case; True means that the user broke it off."""
        contenders = contenders_of(case)
        method = within(self._method(case.method), share_s, len(contenders))
        found = contend(timer, contenders, method, seed=self._spec.seed, progress=progress)
        for one in contenders:
            if one.refusal is not None:
                self._refusals.append(one.refusal)
                self.results.append(self._conclusions.refused(case, one, one.refusal))
            elif one.name in found:
                self.results.append(self._conclusions.measured(case, one, found[one.name]))
                self._remember(case, found[one.name].notes)
            else:
                self._remember(case, [_NOTHING_KEPT])
        return any(measured.interrupted for measured in found.values())

    def _remember(self, case: Case, notes: Iterable[str]) -> None:
        for note in notes:
            self._notes.setdefault(note, []).append(case.title)

    def _method(self, method: Method) -> Method:
        """Do without the blocker, where it would only wait for its watchdog."""
        hindered = hindrance(self._run_context.variables)
        return replace(method, blocker=False) if hindered else method

    def _share_s(self, elapsed_s: float, cases: int) -> float | None:
        """Give each case that is left an equal share of the time that is left."""
        budget_s = self._spec.budget_s
        return None if budget_s is None else (budget_s - elapsed_s) / cases


def _part(progress: Progress, at: int, count: int) -> Progress:
    """Tell of the progress of one case as that of all."""
    return lambda stage, fraction: progress(stage, (at + fraction) / count)
