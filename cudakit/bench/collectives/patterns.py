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
from cudakit.gpu.api.arrays import Bits, Element, encode
from cudakit.gpu.api.collectives import REDUCTIONS, ROOT, Collective

# Number of elements after which a pattern repeats. It is a prime number, so that chunks of a power of two
# begin at different points of the pattern.
PERIOD = 8191
# Maximum of the input values of all types, even of those that represent larger integers exactly.
_MAX_VALUE = 1 << 20


@dataclass(frozen=True, slots=True)
class Pattern:
    """A chunk of a buffer: element i has the bits ``period[(begin + i) % PERIOD]``."""

    period: Bits
    begin: int  # Index of the first element within the period.

    def elements(self, count: int) -> Bits:
        """Return the bits of the first ``count`` elements."""
        return np.take(self.period, np.arange(self.begin, self.begin + count), mode="wrap")


def input_chunks(collective: Collective, rank: int, rank_count: int, seed: int) -> list[Pattern]:
    """Return the chunks of a rank's send buffer.

    Raises Unsupported if sums over the ranks are not exact in the element type.
    """
    period = encode(_input_values(collective, rank, rank_count, seed), collective.element)
    return [
        Pattern(period, chunk * collective.count % PERIOD)
        for chunk in range(collective.send_chunks(rank_count))
    ]


def expected_chunks(collective: Collective, rank: int, rank_count: int, seed: int) -> list[Pattern]:
    """Return the chunks that a rank's receive buffer must have; no chunk if the rank receives nothing."""
    match collective.operation:
        case "all-gather":
            return [
                _input_chunk(collective, source_rank, rank_count, seed, 0)
                for source_rank in range(rank_count)
            ]
        case "all-to-all":
            return [
                _input_chunk(collective, source_rank, rank_count, seed, rank)
                for source_rank in range(rank_count)
            ]
        case "broadcast":
            return [_input_chunk(collective, ROOT, rank_count, seed, 0)]
        case "send-receive":
            return [_input_chunk(collective, (rank - 1) % rank_count, rank_count, seed, 0)]
        case "reduce" if rank != ROOT:
            return []
    chunk = rank if collective.operation == "reduce-scatter" else 0
    summed_values = sum(
        _input_values(collective, source_rank, rank_count, seed)
        for source_rank in range(rank_count)
    )
    period = encode(summed_values, collective.element)
    return [Pattern(period, chunk * collective.count % PERIOD)]


def exact_limit(element: Element) -> int:
    """Return the largest integer up to which an element type represents all integers exactly."""
    if element.is_integer:
        return int(np.iinfo(element.storage_dtype).max)
    if element.format is not None:
        return int(2 ** (element.format.mantissa_bits + 1))
    return int(2 ** (np.finfo(element.storage_dtype).nmant + 1))


def _input_chunk(
    collective: Collective, rank: int, rank_count: int, seed: int, chunk: int
) -> Pattern:
    return input_chunks(collective, rank, rank_count, seed)[chunk]


def _input_values(
    collective: Collective, rank: int, rank_count: int, seed: int
) -> npt.NDArray[np.float64]:
    """Return one period of a rank's input values."""
    largest_sum = exact_limit(collective.element)
    if collective.operation in REDUCTIONS:
        largest_sum //= rank_count
        if not largest_sum:
            raise Unsupported(
                f"sums of {collective.element.name} over {rank_count} ranks are not exact, "
                "so they cannot be verified",
                hint="choose another --dtype",
            )
    return _random_integers(seed, rank, min(largest_sum, _MAX_VALUE))


@lru_cache(maxsize=64)
def _random_integers(seed: int, rank: int, largest_integer: int) -> npt.NDArray[np.float64]:
    values = np.random.default_rng([seed, rank]).integers(0, largest_integer, PERIOD, endpoint=True)
    return values.astype(np.float64)


def chunk_regions(chunks: list[Pattern], chunk_bytes: int) -> Iterator[tuple[int, Pattern]]:
    """Yield the offset in bytes and the pattern of each chunk of a buffer."""
    return ((number * chunk_bytes, chunk) for number, chunk in enumerate(chunks))
