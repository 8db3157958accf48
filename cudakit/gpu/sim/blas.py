"""cuBLAS and cuBLASLt of a simulated device, in numpy and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library, never
from cudakit.gpu.blas.refusals import CHOOSES_ITSELF, TAKE_CUBLASLT, closed
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.algorithms import algorithms, objection, recommended
from cudakit.gpu.sim.multiplication import SimMultiplication
from cudakit.gpu.sim.product import Products
from cudakit.gpu.sim.rates import rates_of
from cudakit.gpu.sim.refusals import refuse_library, refuse_unsupported
from cudakit.units import Unavailable, format_bytes

if TYPE_CHECKING:
    from cudakit.gpu.sim.device import Sim

_ITS_OWN_CHOICE = f"cuBLAS {CHOOSES_ITSELF}"
_TAKE_ANOTHER = "leave the choice to the library, or tune anew"


class SimBlas:
    """A library of a simulated device. Raises Unsupported for torch and CuPy, which need a real one."""

    version = "simulated"

    def __init__(self, sim: Sim, library: Library) -> None:
        refuse_library(library)
        self.library = library
        self._sim = sim
        self._products = Products()
        self._closed = False
        self._check_open()

    def multiplication(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> SimMultiplication:
        """Get ready. Raises Unsupported for an algorithm that is not of those that ``algorithms`` yields."""
        self._check(gemm)
        if algorithm is not None:
            chosen = self._known(gemm, settings, algorithm)
        else:
            chosen = self._recommended(gemm, settings)[0]
        shown = Unavailable(_ITS_OWN_CHOICE) if self.library == "cublas" else chosen
        words = _words(settings, chosen, given=algorithm is not None)
        return SimMultiplication(self._sim, gemm, chosen, shown, words, self._products)

    def heuristics(self, gemm: Gemm, settings: GemmSettings, most: int) -> Sequence[Algorithm]:
        """List the ``most`` best by an estimate, which the first is not always the best by."""
        self._check(gemm)
        self._check_choice()
        return self._recommended(gemm, settings)[:most]

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never
    ) -> Iterator[Algorithm]:
        """Yield every algorithm that settings allow."""
        self._check(gemm)
        self._check_choice()
        return takewhile(lambda _: not is_over(), self._allowed(gemm, settings))

    def close(self) -> None:
        """Refuse every call from then on. A second time does nothing."""
        self._closed = True

    def _allowed(self, gemm: Gemm, settings: GemmSettings) -> tuple[Algorithm, ...]:
        return tuple(each for each in algorithms(gemm) if not objection(each, settings))

    def _recommended(self, gemm: Gemm, settings: GemmSettings) -> tuple[Algorithm, ...]:
        rates = rates_of(self._sim.facts(), gemm.dtype)
        return recommended(gemm, self._allowed(gemm, settings), rates)

    def _known(self, gemm: Gemm, settings: GemmSettings, asked: Algorithm) -> Algorithm:
        """Return the algorithm that has these numbers; what it needs of workspace is for us to say."""
        self._check_choice()
        for each in algorithms(gemm):
            if replace(each, workspace_bytes=asked.workspace_bytes) == asked:
                if reason := objection(each, settings):
                    raise Unsupported(f"algorithm {each.id} {reason}", hint=_TAKE_ANOTHER)
                return each
        raise Unsupported(f"no algorithm for this product is {asked}", hint=_TAKE_ANOTHER)

    def _check(self, gemm: Gemm) -> None:
        self._check_open()
        refuse_unsupported(gemm, self.library, self._sim.facts())

    def _check_choice(self) -> None:
        if self.library == "cublas":
            raise Unsupported(_ITS_OWN_CHOICE, hint=TAKE_CUBLASLT)

    def _check_open(self) -> None:
        if self._sim.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, seen=f"{self._sim.name} was closed")
        if self._closed:
            raise closed(self.library)


def _words(settings: GemmSettings, chosen: Algorithm, *, given: bool) -> Mapping[str, str]:
    used, most = format_bytes(chosen.workspace_bytes), format_bytes(settings.workspace_bytes)
    not_simulated = "not simulated: every sum is rounded once"
    return {
        "chosen_by": "the user" if given else "the heuristics of the simulator",
        "workspace": f"{used} used, {most} at most",
        "deterministic": "yes" if settings.deterministic else "no",
        "reduced_precision": not_simulated,
        "fast_accumulate": not_simulated,
    }
