"""Trials: interleaved measurements of the algorithms of one GEMM, on the same operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from cudakit.bench.case import Method, Verification
from cudakit.bench.gemm import GemmWorkload, PreparedGemm
from cudakit.bench.pipeline import MAX_TIMEOUTS, rotate_buffers
from cudakit.bench.sampling import BufferRotation, SteadyState, make_sample_work
from cudakit.bench.timer import Reading, SampleWork, Timer
from cudakit.bench.tuning.search import DEFAULT_CANDIDATE
from cudakit.errors import CudakitError
from cudakit.gpu.api import Stream
from cudakit.gpu.api.gemm import Algorithm, GemmPlan

# A candidate whose time is more than this multiple of the default's is not measured: it would delay all
# rounds.
_MAX_SLOWDOWN = 3.0
_PILOT_SAMPLES = 2  # Number of samples that estimate the time of a candidate.


@dataclass
class _Candidate:
    """An algorithm that is ready to run."""

    plan: GemmPlan
    rotation: BufferRotation
    estimate_s: float
    work: SampleWork | None = None

    def drop_work(self) -> None:
        """Release the sample work; the next sample creates new work."""
        if self.work is not None:
            self.work.close()
            self.work = None

    def close(self) -> None:
        self.drop_work()
        self.plan.close()


class AlgorithmTrials:
    """Measures the algorithms of a GEMM, which have numbers; number 0 is the library's default.

    Raises Unsupported if the library cannot compute the GEMM with the default.
    """

    def __init__(
        self,
        timer: Timer,
        workload: GemmWorkload,
        method: Method,
        algorithms: Sequence[Algorithm],
        *,
        seed: int,
    ) -> None:
        self.verifications: dict[int, Verification] = {}  # The last verification of each candidate.
        self.errors: dict[int, str] = {}  # Reasons why candidates cannot run.
        self.readings_by_round: list[dict[int, Reading]] = []
        self._timer, self._workload, self._method, self._seed = timer, workload, method, seed
        self._algorithms = algorithms
        self._candidates: dict[int, _Candidate] = {}
        self._is_blocked, self._timeout_count = method.blocker and method.clock == "device", 0
        with ExitStack() as cleanup:
            self._blas = cleanup.enter_context(closing(timer.gpu.blas(workload.library)))
            self._gemm = self._allocate()
            cleanup.callback(lambda: self._gemm.close())
            self._set_count = rotate_buffers(timer, self._gemm, method)
            cleanup.callback(self._close_candidates)
            self._candidates[DEFAULT_CANDIDATE] = self._load_candidate(DEFAULT_CANDIDATE)
            self._cleanup = cleanup.pop_all()

    @property
    def method(self) -> Method:
        """The measurement method, with the blocker, buffer sets and executions that were used."""
        work = self._candidates[DEFAULT_CANDIDATE].work
        return replace(
            self._method,
            blocker=self._is_blocked,
            buffer_sets=self._set_count,
            executions=work.executions if work else 1,
        )

    def warm_up(self, is_over: Callable[[], bool], progress: Callable[[float], None]) -> None:
        """Run the default algorithm until the device has settled or ``is_over()``."""
        state = SteadyState(self._method.warmup_s, self._method.max_warmup_s)
        begin_s = self._timer.now_s()
        while not state.add(self._take_reading(DEFAULT_CANDIDATE), self._timer.now_s() - begin_s):
            if is_over():
                return
            progress(min(state.elapsed_s / state.max_s, 1.0))

    def prepare(self, candidate_number: int) -> bool:
        """Prepare a candidate; return False if it cannot run or is several times slower than the default."""
        try:
            candidate = self._load_candidate(candidate_number)
        except CudakitError as error:
            self._timer.gpu.sync()  # Raises if the device is lost.
            self.errors[candidate_number] = error.message
            return False
        if candidate.estimate_s > _MAX_SLOWDOWN * self._candidates[DEFAULT_CANDIDATE].estimate_s:
            candidate.close()
            return False
        self._candidates[candidate_number] = candidate
        return True

    def release(self, candidate_number: int) -> None:
        """Release the resources of a candidate."""
        self._candidates.pop(candidate_number).close()

    def measure(self, ordered_numbers: Sequence[int]) -> Sequence[float]:
        """Measure each candidate once: in cycles if all clocks are known, else in seconds."""
        readings = {
            candidate_number: self._take_reading(candidate_number)
            for candidate_number in ordered_numbers
        }
        self.readings_by_round.append(readings)
        valid_readings = [reading for reading in readings.values() if reading.valid]
        in_cycles = all(reading.sm_clock_hz for reading in valid_readings)
        return [
            _reading_value(readings[candidate_number], in_cycles=in_cycles)
            for candidate_number in ordered_numbers
        ]

    def verify(self, candidate_number: int) -> bool:
        """Run a candidate on every buffer set, and return whether the outputs are correct."""
        plan, stream = self._candidates[candidate_number].plan, self._timer.stream
        for index in range(self._set_count):
            self._gemm.enqueue_by(plan, stream, index)
        self._timer.gpu.sync_stream(stream)
        self.verifications[candidate_number] = self._gemm.verify()
        return self.verifications[candidate_number].passed

    def reallocate(self) -> None:
        """Continue with new buffers of the same values."""
        for candidate in self._candidates.values():
            candidate.drop_work()
        self._gemm.close()
        self._gemm = self._allocate()
        if self._set_count > 1:
            self._gemm.rotate(self._set_count)

    def times_s(self, candidate_number: int, round_count: int) -> tuple[float, ...]:
        """Return the times of a candidate in the last ``round_count`` rounds; 0 selects all rounds."""
        candidate_readings = (
            readings.get(candidate_number) for readings in self.readings_by_round[-round_count:]
        )
        return tuple(reading.time_s for reading in candidate_readings if reading and reading.valid)

    def close(self) -> None:
        """Release the candidates and their buffers."""
        self._cleanup.close()

    def _allocate(self) -> PreparedGemm:
        """Allocate the operands, which all algorithms share."""
        return PreparedGemm(self._timer.gpu, self._workload, self._seed)

    def _load_candidate(self, candidate_number: int) -> _Candidate:
        """Load the kernel of a candidate by one execution, and estimate its time."""
        workload = self._workload
        plan = self._blas.prepare(
            workload.gemm, workload.settings, self._algorithms[candidate_number]
        )

        def enqueue(stream: Stream, index: int) -> None:
            self._gemm.enqueue_by(plan, stream, index)

        try:
            rotation = BufferRotation(enqueue, self._set_count)
            pilot_work = SampleWork(rotation.run)
            self._timer.time(pilot_work)
            times_s = [self._timer.time(pilot_work).time_s for _ in range(_PILOT_SAMPLES)]
        except BaseException:
            plan.close()
            raise
        return _Candidate(plan, rotation, min(times_s))

    def _take_reading(self, candidate_number: int) -> Reading:
        candidate = self._candidates[candidate_number]
        if candidate.work is None:
            # All candidates have the number of executions of the default, so that their samples are
            # comparable.
            estimate_s = self._candidates[DEFAULT_CANDIDATE].estimate_s
            candidate.work = make_sample_work(
                self._timer, candidate.rotation, self._method, estimate_s
            )
        reading = self._timer.time(candidate.work, is_blocked=self._is_blocked)
        if not reading.valid:
            self._timeout_count += 1
            self._is_blocked = self._timeout_count < MAX_TIMEOUTS
        return reading

    def _close_candidates(self) -> None:
        for candidate in self._candidates.values():
            candidate.close()
        self._candidates.clear()


def _reading_value(reading: Reading, *, in_cycles: bool) -> float:
    if not reading.valid:
        return math.nan
    return reading.time_s * (reading.sm_clock_hz or 1.0) if in_cycles else reading.time_s
