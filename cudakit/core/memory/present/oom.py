"""Failed allocations: the verdict, the remedies, and the figures behind them."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import stack_value
from cudakit.core.memory.result import DeviceMemory, Oom
from cudakit.document import Bytes, Count, Facts, Node, Note


def failures(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Explain the last ``top`` failed allocations, 0 for all."""
    shown = device.ooms if top == 0 else device.ooms[-top:]
    if len(shown) < len(device.ooms):
        yield Note("info", f"the last {len(shown)} of {len(device.ooms)} failed allocations:")
    for oom in shown:
        yield from _oom(oom)


def _oom(oom: Oom) -> Iterator[Node]:
    yield Note("error", oom.sentence, remedies=oom.remedies)
    yield _facts(oom)


def _facts(oom: Oom) -> Facts:
    return Facts(
        (
            ("requested", Bytes(oom.size_bytes)),
            ("free on the device", Bytes(oom.device_free_bytes)),
            ("allocated", Bytes(oom.state.allocated_bytes)),
            ("reserved", Bytes(oom.state.reserved_bytes)),
            ("free in segments", Bytes(oom.free_bytes)),
            ("largest hole", Bytes(oom.largest_hole_bytes)),
            ("pending free", Bytes(oom.state.pending_free_bytes)),
            ("event", Count(oom.event)),
            ("asked by", stack_value(oom.stack, oom.site)),
        )
    )
