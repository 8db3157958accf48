"""All causes of a failed allocation in their order, the root cause first.

The ids and their meanings are in docs/explanation/memviz.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cudakit.memory.result import Cause
from cudakit.memory.verdict.device_causes import (
    LARGE_FREE_SHARE,
    fragmentation,
    other_processes,
    process_limit,
    request_too_large,
)
from cudakit.memory.verdict.failure import Failure
from cudakit.memory.verdict.program_causes import (
    accumulated_blocks,
    capacity,
    first_phase,
    growth,
    one_off_peak,
    retained,
)

CauseFunction = Callable[[Failure], Cause | None]
# The order of causes: a cause comes before its consequences. The last three causes have weak evidence.
CAUSE_FUNCTIONS: Final[tuple[CauseFunction, ...]] = (
    request_too_large,
    retained,
    growth,
    process_limit,
    other_processes,
    one_off_peak,
    fragmentation,
    accumulated_blocks,
    first_phase,
    capacity,
)
# Causes that are compared with the free memory that the request could not use.
_COMPARED_WITH_FREE_MEMORY: Final = (retained, growth, one_off_peak)

# Causes that need the events before the failure, and take longer to find.
_NEEDS_HISTORY: Final = (retained, growth, one_off_peak, accumulated_blocks, first_phase)


def causes_of(failure: Failure, *, with_history: bool) -> tuple[Cause, ...]:
    """Return the causes of a failed allocation, the root cause first; there is at least one.

    If ``with_history`` is false, the causes that need the events before the failure are not searched.
    """
    functions = [
        function for function in CAUSE_FUNCTIONS if with_history or function not in _NEEDS_HISTORY
    ]
    cause_by_function = {
        function: cause for function in functions if (cause := function(failure)) is not None
    }
    if growth in cause_by_function:
        cause_by_function.pop(one_off_peak, None)
    unusable_memory = cause_by_function.get(fragmentation)
    is_main_cause = (
        unusable_memory is not None
        and unusable_memory.sufficient
        and unusable_memory.bytes >= LARGE_FREE_SHARE * failure.request.reserved_bytes
        and all(
            unusable_memory.bytes > cause.bytes
            for function, cause in cause_by_function.items()
            if function in _COMPARED_WITH_FREE_MEMORY
        )
    )
    ordered_causes = [unusable_memory] if is_main_cause and unusable_memory is not None else []
    ordered_causes += sorted(cause_by_function.values(), key=lambda cause: not cause.sufficient)
    cause_by_id: dict[str, Cause] = {}
    for cause in ordered_causes:
        cause_by_id.setdefault(cause.id, cause)
    if len(cause_by_id) > 1:
        cause_by_id.pop("capacity", None)
    return tuple(cause_by_id.values())
