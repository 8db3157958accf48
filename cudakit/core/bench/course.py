"""The course of one workload: how far it is, step by step, and what there is to say at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

from cudakit.core.bench.cache import buffer_sets, is_cold
from cudakit.core.bench.energy import Burn
from cudakit.core.bench.measured import Measured
from cudakit.core.bench.method import Method
from cudakit.core.bench.sampler import Sampler, Turns, sampler
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.selection import Selection
from cudakit.core.bench.stopping import Stopping
from cudakit.core.bench.timer import Reading, Timer
from cudakit.core.bench.verification import Verification
from cudakit.core.bench.warmup import Settling
from cudakit.core.bench.workload import Prepared, RefusedLater, Workload
from cudakit.errors import Unsupported
from cudakit.units import Unavailable

# So often the watchdog may fire before the blocker is given up: something waits for the device each time.
_MOST_LATE = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_PILOTS = 3


class Course:
    """One workload by one method: ``warm_up``, ``begin``, ``sample`` until it is ``done``, ``conclude``."""

    def __init__(
        self,
        timer: Timer,
        workload: Workload,
        prepared: Prepared,
        method: Method,
        pause: Callable[[float], None],
    ) -> None:
        self.title = " ".join([workload.name, *(f"{k}={v}" for k, v in workload.axes.items())])
        self.done = False
        self._timer, self._workload, self._prepared = timer, workload, prepared
        self._method, self._pause = method, pause
        self._blocked = method.blocker and not method.at_host
        self._turns = Turns(prepared, self._rotate())
        self._sampler: Sampler | None = None
        self._settling = Settling(method.warmup_s, method.warmup_most_s)
        self._stopping = Stopping(method.rule)
        self._selection = Selection()
        self._verification = self._verify()
        self._late = 0
        self._pause_s = _FIRST_PAUSE_S
        self._floor_s = 0.0
        self._stopped = "wrong" if self.is_wrong else ""
        self._begin_s = self._elapsed_s = timer.now_s()
        self._begin_runs = self._end_runs = self._turns.runs
        self._energy_j: float | Unavailable = Unavailable("no energy was counted")
        self._before = self._after = timer.gpu.telemetry()

    @property
    def has_samples(self) -> bool:
        """Whether there is anything to conclude from."""
        return bool(self._selection.kept)

    @property
    def is_wrong(self) -> bool:
        """Whether values were computed that are not right."""
        return not self._verification.passed

    @property
    def fraction(self) -> float:
        """How much of the way to the samples is done, as far as one can know."""
        rule, kept = self._method.rule, self._selection.kept
        samples = len(kept) / max(rule.min_samples, 1)
        return min(1.0, max(0.9 * min(samples, 1.0), self._elapsed_s / max(rule.timeout_s, 1e-9)))

    def warm_up(self) -> Iterator[float]:
        """Run until the device has settled; yields how much of the way is done.

        Raises RefusedLater where it cannot run in the method's mode.
        """
        try:
            self._sampler = sampler(self._timer, self._turns, self._method, self._estimate_s())
        except Unsupported as refusal:
            raise RefusedLater(self._workload, refusal) from refusal
        self._floor_s = self._nothing_s()
        begin_s = self._timer.now_s()
        while True:
            reading = self._read()
            self._selection.look(reading)
            if self._settling.add(reading, self._timer.now_s() - begin_s):
                break
            yield self._settling.elapsed_s / self._settling.most_s

    def begin(self) -> None:
        """Let the time for samples begin."""
        self._before = self._timer.gpu.telemetry()
        self._begin_runs = self._turns.runs
        self._begin_s = self._timer.now_s()

    def sample(self) -> None:
        """Take a reading, which may be a sample or not, and may be the last."""
        reading = self._read()
        self._elapsed_s = self._timer.now_s() - self._begin_s
        if self._selection.add(reading):
            self._pause_s = _FIRST_PAUSE_S
            self._consider(reading)
        elif self._elapsed_s >= self._method.rule.timeout_s:
            self._stop("timeout")
        elif reading.valid:
            self._pause(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def end(self) -> None:
        """Let the time for samples end."""
        self._end_runs = self._turns.runs
        self._after = self._timer.gpu.telemetry()

    def count_energy(self) -> Iterator[float]:
        """Go on until the energy of an execution is known; yields how much of the way is done."""
        if self._sampler is None or not (self._method.energy_s and self.has_samples):
            return
        burn = Burn(
            self._timer.gpu,
            self._timer.stream,
            self._sampler.enqueue,
            runs=self._executions,
            run_s=median(reading.time_s for reading in self._selection.kept),
            least_s=self._method.energy_s,
            now_s=self._timer.now_s,
        )
        try:
            yield from burn.go_on()
        except BaseException:
            self._stopped = "interrupted"
            raise
        self._energy_j = burn.per_run_j()

    def conclude(self) -> Measured:
        """Verify what was computed meanwhile, and say everything. What is wrong leaves no samples."""
        if not self.is_wrong:
            if not self.done:
                self._stop("interrupted")
                self.end()
            self._verification = self._verify()
        samples = self._samples()
        return Measured(
            name=self._workload.name,
            axes=dict(self._workload.axes),
            method=self._method_as_it_was(),
            samples=samples,
            verification=self._verification,
            stopped="wrong" if self.is_wrong else self._stopped,
            settled=self._settling.settled,
            cold=self._is_cold(),
            warmup=tuple(self._settling.readings),
            discarded=tuple(self._selection.discarded),
            floor_s=self._floor_s,
            before=self._before,
            after=self._after,
            footprint_bytes=self._prepared.footprint_bytes,
            bytes_moved=self._prepared.bytes_moved,
            operations=self._prepared.operations,
            executions=self._end_runs - self._begin_runs,
            energy_j=self._energy_j,
            elapsed_s=self._elapsed_s,
            notes=tuple(self._notes()),
        )

    def close(self) -> None:
        """Give back what was made for it; the workload is closed by who prepared it."""
        if self._sampler is not None:
            self._sampler.close()

    @property
    def _executions(self) -> int:
        return self._sampler.executions if self._sampler else 1

    def _rotate(self) -> int:
        sets = buffer_sets(
            self._method.cache,
            l2_bytes=self._timer.l2_bytes,
            footprint_bytes=self._prepared.footprint_bytes,
            free_bytes=self._timer.gpu.memory_info().free_bytes,
        )
        if sets > 1:
            self._prepared.rotate(sets)
        return sets

    def _verify(self) -> Verification:
        """Have every buffer set run since the last time, and look at what was computed."""
        self._turns.complete(self._timer.stream)
        self._timer.gpu.sync_stream(self._timer.stream)
        return self._prepared.verify()

    def _estimate_s(self) -> float:
        pilots = (self._timer.time(self._turns.run, blocked=False) for _ in range(_PILOTS))
        return min(pilot.time_s for pilot in pilots)

    def _nothing_s(self) -> float:
        """Time nothing, as the samples are timed."""
        timer, waits = self._timer, self._method.mode == "host"
        if self._method.at_host:
            timings = (timer.time_at_host(_nothing, waits=waits) for _ in range(_PILOTS))
        else:
            timings = (timer.time(_nothing, blocked=self._blocked) for _ in range(_PILOTS))
        return min(timing.time_s for timing in timings)

    def _read(self) -> Reading:
        if self._sampler is None:
            raise AssertionError("samples before the warm-up")
        reading = self._sampler.sample(blocked=self._blocked)
        if not reading.valid:
            self._late += 1
            self._blocked = self._late < _MOST_LATE
        return reading

    def _consider(self, reading: Reading) -> None:
        """Have the rule look at a sample, unless there are enough already."""
        time_s = reading.time_s * self._executions
        if not self.done and self._stopping.add(time_s, elapsed_s=self._elapsed_s):
            self._stop(self._stopping.reason)

    def _stop(self, why: str) -> None:
        if not self.done:
            self.done, self._stopped = True, why

    def _samples(self) -> Samples:
        kept, discarded = self._selection.kept, len(self._selection.discarded)
        if self.is_wrong:
            return Samples((), discarded=discarded, converged=False)
        clocks = tuple(r.sm_clock_hz for r in kept if r.sm_clock_hz is not None)
        return Samples(
            times_s=tuple(reading.time_s for reading in kept),
            sm_clock_hz=clocks if len(clocks) == len(kept) else (),
            discarded=discarded,
            converged=self._stopping.converged,
        )

    def _method_as_it_was(self) -> Method:
        return replace(
            self._method,
            warmup_s=self._settling.elapsed_s,
            blocker=self._blocked,
            executions=self._executions,
            buffer_sets=self._turns.sets,
        )

    def _is_cold(self) -> bool:
        if self._method.cache != "rotate":
            return self._method.cache == "flush"
        footprint = self._prepared.footprint_bytes
        if not footprint:
            return True
        return is_cold(self._turns.sets, l2_bytes=self._timer.l2_bytes, footprint_bytes=footprint)

    def _notes(self) -> Iterator[str]:
        if self._late and not self._blocked:
            yield "the blocker was given up: a call waited for the device, so gaps between launches count"
        if self._selection.gave_up:
            yield "the clock stayed low: samples at a low clock count"
        if self._method.cache == "rotate" and not self._is_cold():
            yield "too few buffer sets to have the cache overwritten between two runs on one"
        if not self._settling.settled:
            yield "clock and times still moved when the warm-up ended"


def _nothing(stream: object) -> None:
    """Enqueue no work."""
