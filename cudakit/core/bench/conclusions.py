"""From what was measured to a result: on which machine, beside which limit, by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from cudakit.core.bench.case import Case
from cudakit.core.bench.contenders import OURSELVES, Contender
from cudakit.core.bench.environment import Environment, environment
from cudakit.core.bench.limits import Limit, limit
from cudakit.core.bench.measured import Measured
from cudakit.core.bench.result import CaseResult, case_result
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.verification import NOTHING_TO_VERIFY, Verification
from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import Telemetry
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_NO_VALUES = Unavailable("it computes no values")


class Conclusions:
    """Makes the results of one device."""

    def __init__(self, gpu: Gpu, run_context: RunContext) -> None:
        self._simulated, self._facts = gpu.simulated, gpu.facts()
        self._run_context = run_context
        managed = run_context.nvml_device
        self._fields = {**(managed.fields if managed else {}), **self._facts.fields}

    def measured(self, case: Case, contender: Contender, measured: Measured) -> CaseResult:
        """Conclude what was run."""
        return case_result(
            case.workload.name,
            measured.axes,
            measured.samples,
            method=measured.method,
            environment=self._environment(measured.before, measured.after),
            limit=self._limit(case, measured.samples),
            verification=_verification(measured),
            operations=measured.operations,
            operation=case.operation,
            bytes_moved=measured.bytes_moved,
            energy_j=measured.energy_j,
            contender=contender.by,
            settings=_settings(case, contender),
        )

    def refused(self, case: Case, contender: Contender, refusal: Unsupported) -> CaseResult:
        """Conclude what was not run: every figure says why there is none."""
        why = Unavailable(refusal.message)
        empty = case_result(
            case.workload.name,
            contender.axes,
            Samples((), converged=False),
            method=case.method,
            environment=self._environment(),
            limit=why,
            verification=why,
            operation=case.operation,
            contender=contender.by,
            settings=_settings(case, contender),
        )
        return replace(
            empty,
            median_s=why,
            ci95_s=why,
            ratio_to_limit=why,
            ratio_to_datasheet=why,
            statistics=why,
            energy_j=why,
        )

    def _environment(
        self, before: Telemetry | None = None, after: Telemetry | None = None
    ) -> Environment:
        return environment(
            self._facts,
            self._run_context,
            simulated=self._simulated,
            before=before,
            after=after,
        )

    def _limit(self, case: Case, samples: Samples) -> Limit | Unavailable:
        if isinstance(case.work, Unavailable):
            return case.work
        clocks = samples.sm_clock_hz
        clock = median(clocks) if clocks else Unavailable("the clock was not measured")
        return limit(case.work, self._fields, clock)


def _verification(measured: Measured) -> Verification | Unavailable:
    found = measured.verification
    return _NO_VALUES if found is NOTHING_TO_VERIFY else found


def _settings(case: Case, contender: Contender) -> Mapping[str, str | int | float]:
    """Put together what the case says, who ran it, and how that was set up."""
    library = {} if contender.by == OURSELVES else {"library": contender.by}
    return {**case.settings, **library, **contender.settings}
