"""How long a search may take, and from when on a difference counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cudakit.errors import InputError

# Half of them are for the final, whose three finalists need 9 pairs: that all lie on one side has then a
# probability of 2 ** -9, which is less than LEVEL / 3.
LEAST_ITERATIONS = 20

# Of a search in which nothing is faster than the default, the share that finds a winner all the same.
LEVEL = 0.01
# A smaller gain is not worth another algorithm: by so much the speed of one and the same differs from one
# place of its buffers in memory to another.
LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the search for one product. Raises InputError for what makes no sense."""

    time_s: float = 30.0  # about, all that is done for a product included
    iterations: int = 100  # samples of each candidate at most; the default has one beside each

    def __post_init__(self) -> None:
        if not 0 < self.time_s < math.inf:
            raise InputError(
                f"the time for tuning is {self.time_s:g} s, and must be a number above 0"
            )
        if self.iterations < LEAST_ITERATIONS:
            raise InputError(
                f"the number of iterations is {self.iterations}, and must be at least {LEAST_ITERATIONS}",
                hint="with fewer samples no gain is significant",
            )
