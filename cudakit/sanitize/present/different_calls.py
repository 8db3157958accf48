"""Present the collectives that ranks call differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cudakit.report.document import Facts, Finding, Note, Section, Stack, Text
from cudakit.sanitize.result import CollectiveCall, DifferenceKind, DifferentCalls
from cudakit.units import capitalized

MEANINGS: Final = {
    DifferenceKind.FUNCTION: "Ranks of a communicator call different collectives, or in different order.",
    DifferenceKind.COUNT: "Ranks of a communicator call a collective with different numbers of elements.",
    DifferenceKind.DATATYPE: "Ranks of a communicator call a collective with different types of elements.",
    DifferenceKind.ROOT: "Ranks of a communicator call a collective with different roots.",
    DifferenceKind.TRANSFER: "A rank receives another number of bytes than the other rank sends.",
}


_HEADINGS: Final = {
    DifferenceKind.FUNCTION: "Ranks call different collectives",
    DifferenceKind.COUNT: "Ranks pass different numbers of elements",
    DifferenceKind.DATATYPE: "Ranks pass different types of elements",
    DifferenceKind.ROOT: "Ranks pass different roots",
    DifferenceKind.TRANSFER: "A send and its receive have different sizes",
}


def call_sections(differences: Sequence[DifferentCalls]) -> Iterator[Section]:
    """Yield one section for each pair of calls that differ."""
    for difference in differences:
        facts = Facts(
            tuple(
                (f"rank {call.rank}", fact_value)
                for call in (difference.first, difference.second)
                for fact_value in (Text(f"{call.operation}, process {call.process}"), _stack(call))
            )
        )
        yield Section(_HEADINGS[difference.kind], (calls_note(difference), facts))


def calls_note(difference: DifferentCalls) -> Note:
    """Return the sentence of two calls that differ, and the finding for structured formats."""
    calls = (difference.first, difference.second)
    locations = tuple((f"rank {call.rank}: {call.operation}", _stack(call)) for call in calls)
    finding = Finding(
        f"different-{difference.kind.value}", MEANINGS[difference.kind], locations, count=1
    )
    return Note("error", capitalized(difference.sentence), (difference.hint,), finding)


def _stack(call: CollectiveCall) -> Stack:
    return Stack(call.stack, call.site)
