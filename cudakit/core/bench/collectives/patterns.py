"""Input patterns of collective operations, and the expected outputs: the host reference.

Every rank has its own periodic pattern of small integers. All partial sums are exact in the element type, so
that the order of additions does not matter and outputs are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cudakit.errors import Unsupported
from cudakit.gpu.api.collectives import REDUCTIONS, ROOT, Collective
from cudakit.gpu.api.elements import Bits, Element, encode

# Number of elements after which a pattern repeats. It is a prime number, so that chunks of a power of two
# begin at different points of the pattern.
PERIOD = 8191
# Maximum of the input values, also in types that represent larger integers exactly.
_MAX_VALUE = 1 << 20


@dataclass(frozen=True, slots=True)
class Pattern:
    """A chunk of a buffer: element i has the bits ``period[(begin + i) % PERIOD]``."""

    period: Bits
    begin: int  # Index of the first element within the period.

    def elements(self, count: int) -> Bits:
        """Return the bits of the first ``count`` elements."""
        return np.take(self.period, np.arange(self.begin, self.begin + count), mode="wrap")


def input_chunks(collective: Collective, rank: int, ranks: int, seed: int) -> list[Pattern]:
    """Return the chunks of a rank's send buffer.

    Raises Unsupported if sums over the ranks are not exact in the element type.
    """
    period = encode(_input_values(collective, rank, ranks, seed), collective.element)
    return [
        Pattern(period, chunk * collective.count % PERIOD)
        for chunk in range(collective.send_chunks(ranks))
    ]


def expected_chunks(collective: Collective, rank: int, ranks: int, seed: int) -> list[Pattern]:
    """Return the chunks that a rank's receive buffer must have; no chunk if the rank receives nothing."""
    match collective.operation:
        case "all-gather":
            return [_input_chunk(collective, source, ranks, seed, 0) for source in range(ranks)]
        case "all-to-all":
            return [_input_chunk(collective, source, ranks, seed, rank) for source in range(ranks)]
        case "broadcast":
            return [_input_chunk(collective, ROOT, ranks, seed, 0)]
        case "send-receive":
            return [_input_chunk(collective, (rank - 1) % ranks, ranks, seed, 0)]
        case "reduce" if rank != ROOT:
            return []
    chunk = rank if collective.operation == "reduce-scatter" else 0
    total = sum(_input_values(collective, source, ranks, seed) for source in range(ranks))
    period = encode(total, collective.element)
    return [Pattern(period, chunk * collective.count % PERIOD)]


def exact_limit(element: Element) -> int:
    """Return the largest integer up to which an element type represents all integers exactly."""
    if element.is_integer:
        return int(np.iinfo(element.bits).max)
    if element.format is not None:
        return int(2 ** (element.format.mantissa_bits + 1))
    return int(2 ** (np.finfo(element.bits).nmant + 1))


def _input_chunk(collective: Collective, rank: int, ranks: int, seed: int, chunk: int) -> Pattern:
    return input_chunks(collective, rank, ranks, seed)[chunk]


def _input_values(
    collective: Collective, rank: int, ranks: int, seed: int
) -> npt.NDArray[np.float64]:
    """Return one period of a rank's input values."""
    limit = exact_limit(collective.element)
    if collective.operation in REDUCTIONS:
        limit //= ranks
        if not limit:
            raise Unsupported(
                f"sums of {collective.element.name} over {ranks} ranks are not exact, "
                "so they cannot be verified",
                hint="choose another --dtype",
            )
    return _random_integers(seed, rank, min(limit, _MAX_VALUE))


@lru_cache(maxsize=64)
def _random_integers(seed: int, rank: int, largest: int) -> npt.NDArray[np.float64]:
    values = np.random.default_rng([seed, rank]).integers(0, largest, PERIOD, endpoint=True)
    return values.astype(np.float64)


def chunk_regions(chunks: list[Pattern], chunk_bytes: int) -> Iterator[tuple[int, Pattern]]:
    """Yield the offset in bytes and the pattern of each chunk of a buffer."""
    return ((number * chunk_bytes, chunk) for number, chunk in enumerate(chunks))
