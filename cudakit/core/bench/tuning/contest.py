"""Algorithms of one product in turn, on the same operands: what the search measures on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from cudakit.core.bench.cache import buffer_sets
from cudakit.core.bench.method import Method
from cudakit.core.bench.sampler import Sampler, Turns, sampler
from cudakit.core.bench.timer import Reading, Timer
from cudakit.core.bench.tuning.search import DEFAULT
from cudakit.core.bench.tuning.shared import ByAlgorithm, Shared
from cudakit.core.bench.verification import Verification
from cudakit.core.bench.warmup import Settling
from cudakit.core.bench.workloads.gemm import GemmWorkload
from cudakit.errors import CudakitError
from cudakit.gpu.api.gemm import Algorithm

# What takes so many times what the default takes is not measured: a sample of it would take as long as those
# of many others.
_TOO_SLOW = 3.0
_PILOTS = 2
# So often the watchdog may fire before the blocker is given up.
_MOST_LATE = 2


class _Entrant:
    """A candidate that is ready to be measured."""

    def __init__(self, run: ByAlgorithm, turns: Turns, estimate_s: float) -> None:
        self.run, self.turns, self.estimate_s = run, turns, estimate_s
        self.sampler: Sampler | None = None

    def forget_sampler(self) -> None:
        """Have the next sample made by another, as for other buffers."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def close(self) -> None:
        self.forget_sampler()
        self.run.close()


class AlgorithmContest:
    """Algorithms by number; the first is the default. ``close`` gives everything back.

    Raises Unsupported where the library cannot compute the product, or not by the default.
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
        self._entrants: dict[int, _Entrant] = {}
        self._blocked, self._late = method.blocker and not method.at_host, 0
        with ExitStack() as owned:
            self._blas = owned.enter_context(closing(timer.gpu.blas(workload.library)))
            self._shared = owned.enter_context(closing(Shared(timer.gpu, workload, seed)))
            self._sets = self._count_sets()
            self._shared.rotate(self._sets)
            owned.callback(self._close_entrants)
            self._entrants[DEFAULT] = self._entrant(DEFAULT)
            self._owned = owned.pop_all()

    @property
    def method(self) -> Method:
        """How samples are taken."""
        sampler = self._entrants[DEFAULT].sampler
        return replace(
            self._method,
            blocker=self._blocked,
            buffer_sets=self._sets,
            executions=sampler.executions if sampler else 1,
        )

    def warm_up(self, is_over: Callable[[], bool], tell: Callable[[float], None]) -> None:
        """Run the default until the device has settled, or the time for that is over."""
        settling = Settling(self._method.warmup_s, self._method.warmup_most_s)
        begin_s = self._timer.now_s()
        while not settling.add(self._read(DEFAULT), self._timer.now_s() - begin_s):
            if is_over():
                return
            tell(min(settling.elapsed_s / settling.most_s, 1.0))

    # --- what the search asks for

    def enter(self, number: int) -> bool:
        """Get ready to measure a candidate; False for one that cannot run, or is far too slow."""
        try:
            entrant = self._entrant(number)
        except CudakitError as error:
            self._timer.gpu.sync()  # which raises, where the device is lost
            self.refused[number] = error.message
            return False
        if entrant.estimate_s > _TOO_SLOW * self._entrants[DEFAULT].estimate_s:
            entrant.close()
            return False
        self._entrants[number] = entrant
        return True

    def leave(self, number: int) -> None:
        """Give back what was made for a candidate."""
        self._entrants.pop(number).close()

    def measure(self, order: Sequence[int]) -> Sequence[float]:
        """Measure each once: in cycles, where the clock is known of all, else in seconds."""
        readings = {number: self._read(number) for number in order}
        self.rounds.append(readings)
        valid = [reading for reading in readings.values() if reading.valid]
        in_cycles = all(reading.sm_clock_hz for reading in valid)
        return [_value(readings[number], in_cycles=in_cycles) for number in order]

    def verify(self, number: int) -> bool:
        """Have a candidate compute every buffer set, and look at that."""
        run, gpu = self._entrants[number].run, self._timer.gpu
        for index in range(self._sets):
            run.enqueue(self._timer.stream, index)
        gpu.sync_stream(self._timer.stream)
        self.verifications[number] = self._shared.verify()
        return self.verifications[number].passed

    def renew(self) -> None:
        """Go on with other buffers, of the same values."""
        for entrant in self._entrants.values():
            entrant.forget_sampler()
        self._shared.renew()
        self._shared.rotate(self._sets)

    # --- what is to be said of it

    def times_s(self, number: int, rounds: int) -> tuple[float, ...]:
        """Return the times of a candidate in the last rounds, or in all of them for 0."""
        found = (readings.get(number) for readings in self.rounds[-rounds:])
        return tuple(reading.time_s for reading in found if reading and reading.valid)

    def close(self) -> None:
        """Give everything back."""
        self._owned.close()

    # --- how

    def _entrant(self, number: int) -> _Entrant:
        """Make a candidate run: a first time for its kernel to be loaded, then to see how long it takes."""
        workload = self._workload
        multiplication = self._blas.multiplication(
            workload.gemm, workload.settings, self._algorithms[number]
        )
        run = ByAlgorithm(self._shared, multiplication)
        try:
            turns = Turns(run, self._sets)
            self._timer.time(turns.run, blocked=False)
            pilots = [self._timer.time(turns.run, blocked=False).time_s for _ in range(_PILOTS)]
        except BaseException:
            run.close()
            raise
        return _Entrant(run, turns, min(pilots))

    def _read(self, number: int) -> Reading:
        entrant = self._entrants[number]
        if entrant.sampler is None:
            # Of all alike, so that a round is as long as it can be foreseen, and events resolve as much.
            estimate_s = self._entrants[DEFAULT].estimate_s
            entrant.sampler = sampler(self._timer, entrant.turns, self._method, estimate_s)
        reading = entrant.sampler.sample(blocked=self._blocked)
        if not reading.valid:
            self._late += 1
            self._blocked = self._late < _MOST_LATE
        return reading

    def _count_sets(self) -> int:
        return buffer_sets(
            self._method.cache,
            l2_bytes=self._timer.l2_bytes,
            footprint_bytes=self._shared.footprint_bytes,
            free_bytes=self._timer.gpu.memory_info().free_bytes,
        )

    def _close_entrants(self) -> None:
        for entrant in self._entrants.values():
            entrant.close()
        self._entrants.clear()


def _value(reading: Reading, *, in_cycles: bool) -> float:
    if not reading.valid:
        return math.nan
    return reading.time_s * (reading.sm_clock_hz or 1.0) if in_cycles else reading.time_s
