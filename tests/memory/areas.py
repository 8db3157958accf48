"""The segments of the simulated allocator, their blocks, and the expected state of a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from memory.builders import MIB, Block, Segment

from cudakit.memory.snapshot import BlockState, SegmentKind

SMALL_SEGMENT, LARGE_SEGMENT = (
    2 * MIB,
    20 * MIB,
)  # the segment sizes are also the page sizes of expandable segments


class Use(Enum):
    FREE = "free"
    ALLOCATED = "allocated"
    PENDING = "pending"  # freed, but other streams still use it
    UNMAPPED = "unmapped"


@dataclass(eq=False, slots=True)
class Piece:
    """A block, or an unmapped range, of an Area."""

    address: int
    size: int
    use: Use = Use.FREE
    requested: int = 0
    stack: int = 0
    lifetime: int = -1  # index into the allocator's list of lifetimes
    other_streams: set[int] = field(default_factory=set)
    waits_for: int = 0  # events of other streams that are not done

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False, slots=True)
class Area:
    """A segment, or the address range of an expandable segment."""

    pool: int
    stream: int
    small: bool
    expandable: bool
    pieces: list[Piece]

    @property
    def address(self) -> int:
        return self.pieces[0].address

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def after(self, piece: Piece) -> Piece | None:
        index = self.pieces.index(piece) + 1
        return self.pieces[index] if index < len(self.pieces) else None

    def size_with_unmapped(self, piece: Piece) -> int:
        """Return the size of a free block together with the unmapped range after it."""
        behind = self.after(piece)
        return piece.size + (behind.size if behind and behind.use == Use.UNMAPPED else 0)

    def free_size_from(self, index: int) -> int:
        """Return the contiguous free or unmapped bytes from a block on."""
        free_size = 0
        for piece in self.pieces[index:]:
            if piece.use not in (Use.FREE, Use.UNMAPPED):
                break
            free_size += piece.size
        return free_size

    def split(self, piece: Piece, size: int) -> None:
        """Split a block; the remainder has the same use."""
        rest = Piece(piece.address + size, piece.size - size, piece.use)
        if rest.size:
            piece.size = size
            self.pieces.insert(self.pieces.index(piece) + 1, rest)

    def merge(self, piece: Piece) -> Piece:
        """Merge a free block or unmapped range with adjacent ones of the same use."""
        index = self.pieces.index(piece)
        first = index - (index > 0 and self.pieces[index - 1].use == piece.use)
        last = index + (index + 1 < len(self.pieces) and self.pieces[index + 1].use == piece.use)
        parts = self.pieces[first : last + 1]
        merged = Piece(parts[0].address, sum(part.size for part in parts), piece.use)
        self.pieces[first : last + 1] = [merged]
        return merged

    def runs(self) -> Iterator[list[Piece]]:
        """Yield contiguous sequences of mapped blocks."""
        run: list[Piece] = []
        for piece in [*self.pieces, Piece(self.end, 0, Use.UNMAPPED)]:
            if piece.use != Use.UNMAPPED:
                run.append(piece)
            elif run:
                yield run
                run = []

    def segments(self) -> Iterator[Segment]:
        """Yield segments as PyTorch reports them: each contiguous mapped range is one."""
        for run in self.runs():
            yield Segment(
                address=run[0].address,
                size=sum(piece.size for piece in run),
                blocks=tuple(_block(piece) for piece in run if piece.use != Use.FREE),
                stream=self.stream,
                kind=SegmentKind.SMALL if self.small else SegmentKind.LARGE,
                pool=self.pool,
                expandable=self.expandable,
            )


def _block(piece: Piece) -> Block:
    pending = piece.use == Use.PENDING
    state = BlockState.PENDING_FREE if pending else BlockState.ALLOCATED
    return Block(piece.address, piece.size, piece.requested, state, piece.stack)


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The expected totals and segments (by address) at one moment."""

    requested: int
    allocated: int
    active: int
    reserved: int
    segments: tuple[Segment, ...]


def expected_state_of(areas: Iterable[Area]) -> ExpectedState:
    segments = [segment for area in areas for segment in area.segments()]
    blocks = [block for segment in segments for block in segment.blocks]
    return ExpectedState(
        requested=sum(block.requested or 0 for block in blocks),
        allocated=sum(block.size for block in blocks if block.state == BlockState.ALLOCATED),
        active=sum(block.size for block in blocks),
        reserved=sum(segment.size for segment in segments),
        segments=tuple(sorted(segments, key=lambda segment: segment.address)),
    )
