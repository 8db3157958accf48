"""Trials of algorithms of one GEMM, interleaved, on the same operands: what the search measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.method import Method
from cudakit.core.bench.prepare import MOST_TIMEOUTS, rotate_buffers
from cudakit.core.bench.sampler import BufferRotation, Sampler, make_sampler
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.tuning.search import DEFAULT
from cudakit.core.bench.warm_up import SteadyState
from cudakit.core.bench.workload import Verification
from cudakit.core.bench.workloads.gemm import GemmWorkload, PreparedGemm
from cudakit.errors import CudakitError
from cudakit.gpu.api import Stream
from cudakit.gpu.api.gemm import Algorithm, GemmPlan

# A candidate that takes this many times as long as the default is not measured: its sample would take as long
# as those of many others.
_TOO_SLOW = 3.0
_PILOTS = 2


@dataclass
class _Candidate:
    """An algorithm that is ready to be measured."""

    plan: GemmPlan
    rotation: BufferRotation
    estimate_s: float
    sampler: Sampler | None = None

    def forget_sampler(self) -> None:
        """Drop the sampler, so that the next sample makes a new one: the buffers changed."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def close(self) -> None:
        self.forget_sampler()
        self.plan.close()


class AlgorithmTrials:
    """Algorithms by number; the first is the default.

    Raises Unsupported if the library cannot compute the product, or not by the default.
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
        self.verifications: dict[int, Verification] = {}  # the last of each
        self.refused: dict[int, str] = {}  # why candidates cannot run
        self.rounds: list[dict[int, Reading]] = []
        self._timer, self._workload, self._method, self._seed = timer, workload, method, seed
        self._algorithms = algorithms
        self._candidates: dict[int, _Candidate] = {}
        self._blocked, self._timeouts = method.blocker and not method.at_host, 0
        with ExitStack() as owned:
            self._blas = owned.enter_context(closing(timer.gpu.blas(workload.library)))
            self._product = self._make_product()
            owned.callback(lambda: self._product.close())
            self._sets = rotate_buffers(timer, self._product, method)
            owned.callback(self._close_candidates)
            self._candidates[DEFAULT] = self._make(DEFAULT)
            self._owned = owned.pop_all()

    @property
    def method(self) -> Method:
        """How samples are taken."""
        sampler = self._candidates[DEFAULT].sampler
        return replace(
            self._method,
            blocker=self._blocked,
            buffer_sets=self._sets,
            executions=sampler.executions if sampler else 1,
        )

    def warm_up(self, is_over: Callable[[], bool], progress: Callable[[float], None]) -> None:
        """Run the default until the device has settled, or until ``is_over``."""
        state = SteadyState(self._method.warmup_s, self._method.warmup_most_s)
        begin_s = self._timer.now_s()
        while not state.add(self._read(DEFAULT), self._timer.now_s() - begin_s):
            if is_over():
                return
            progress(min(state.elapsed_s / state.most_s, 1.0))

    def enter(self, number: int) -> bool:
        """Prepare a candidate; return False if it cannot run, or is far slower than the default."""
        try:
            candidate = self._make(number)
        except CudakitError as error:
            self._timer.gpu.sync()  # raises if the device is lost
            self.refused[number] = error.message
            return False
        if candidate.estimate_s > _TOO_SLOW * self._candidates[DEFAULT].estimate_s:
            candidate.close()
            return False
        self._candidates[number] = candidate
        return True

    def leave(self, number: int) -> None:
        """Release a candidate."""
        self._candidates.pop(number).close()

    def measure(self, order: Sequence[int]) -> Sequence[float]:
        """Measure each once: in cycles if every clock is known, else in seconds."""
        readings = {number: self._read(number) for number in order}
        self.rounds.append(readings)
        valid = [reading for reading in readings.values() if reading.valid]
        in_cycles = all(reading.sm_clock_hz for reading in valid)
        return [_value(readings[number], in_cycles=in_cycles) for number in order]

    def verify(self, number: int) -> bool:
        """Compute every buffer set by a candidate, and check the outputs."""
        plan, stream = self._candidates[number].plan, self._timer.stream
        for index in range(self._sets):
            self._product.enqueue_by(plan, stream, index)
        self._timer.gpu.sync_stream(stream)
        self.verifications[number] = self._product.verify()
        return self.verifications[number].passed

    def renew(self) -> None:
        """Continue with other buffers of the same values."""
        for candidate in self._candidates.values():
            candidate.forget_sampler()
        self._product.close()
        self._product = self._make_product()
        if self._sets > 1:
            self._product.rotate(self._sets)

    def times_s(self, number: int, rounds: int) -> tuple[float, ...]:
        """Return the times of a candidate in the last rounds, or in all of them for 0."""
        found = (readings.get(number) for readings in self.rounds[-rounds:])
        return tuple(reading.time_s for reading in found if reading and reading.valid)

    def close(self) -> None:
        """Release everything."""
        self._owned.close()

    def _make_product(self) -> PreparedGemm:
        """Allocate the operands that all algorithms share."""
        return PreparedGemm(self._timer.gpu, self._workload, self._seed)

    def _make(self, number: int) -> _Candidate:
        """Run a candidate once, so that its kernel is loaded, then estimate its time."""
        workload = self._workload
        plan = self._blas.prepare(workload.gemm, workload.settings, self._algorithms[number])

        def enqueue(stream: Stream, index: int) -> None:
            self._product.enqueue_by(plan, stream, index)

        try:
            rotation = BufferRotation(enqueue, self._sets)
            self._timer.time(rotation.run, blocked=False)
            pilots = [self._timer.time(rotation.run, blocked=False).time_s for _ in range(_PILOTS)]
        except BaseException:
            plan.close()
            raise
        return _Candidate(plan, rotation, min(pilots))

    def _read(self, number: int) -> Reading:
        candidate = self._candidates[number]
        if candidate.sampler is None:
            # The same number of executions for all: the length of a round is known, and so is the resolution.
            estimate_s = self._candidates[DEFAULT].estimate_s
            candidate.sampler = make_sampler(
                self._timer, candidate.rotation, self._method, estimate_s
            )
        reading = candidate.sampler.sample(blocked=self._blocked)
        if not reading.valid:
            self._timeouts += 1
            self._blocked = self._timeouts < MOST_TIMEOUTS
        return reading

    def _close_candidates(self) -> None:
        for candidate in self._candidates.values():
            candidate.close()
        self._candidates.clear()


def _value(reading: Reading, *, in_cycles: bool) -> float:
    if not reading.valid:
        return math.nan
    return reading.time_s * (reading.sm_clock_hz or 1.0) if in_cycles else reading.time_s
