"""Decide whether a race belongs to the program, or to a library that the program calls.

A race belongs to a library in two cases. (1) Both operations were enqueued during one program call: one
execution of an instruction of the program's own code, such as a call of a library. (2) One program call
created the streams of both operations and enqueued the first work on each of them, and the program's own
code never called CUDA with these streams. Every other race, and one that cannot be attributed, belongs to
the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np

from cudakit.sanitize.races import KnownIssue, Race, RaceOwner, Side
from cudakit.stacks import Frame, Stack, call_site_index, is_backward, is_library, library_name
from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import Records

_WORK_KINDS: Final = (
    EventKind.LAUNCH,
    EventKind.COPY,
    EventKind.FILL,
    EventKind.ALLOC,
    EventKind.FREE,
    EventKind.COLLECTIVE,
    EventKind.GRAPH_LAUNCH,
)


def library_of(frames: Sequence[Frame]) -> str:
    """Return the library that the program called, such as ``torch``; "" without a frame of a library."""
    entry_frame = library_entry(frames)
    return library_name(entry_frame.filename) if entry_frame else ""


def library_entry(frames: Sequence[Frame]) -> Frame | None:
    """Return the frame of the library function that the program called.

    Returns None if the program called CUDA without a library, or the call stack has no frame of the program.
    """
    site = call_site_index(frames)
    innermost_index = int(is_backward(frames))
    if not frames or site <= innermost_index or is_library(frames[site].filename):
        return None
    return frames[site - 1]


def is_one_program_call(race: Race) -> bool:
    """Return whether both operations of a race were enqueued during one call of the program to a library."""
    current_side, previous_side = race.current, race.previous
    if current_side.graph and current_side.seq == previous_side.seq:
        # One launch enqueues all nodes of a graph, so the program calls that captured the nodes are
        # compared.
        return current_side.capturing_call == previous_side.capturing_call != 0
    return current_side.program_call == previous_side.program_call != 0


# PyTorch creates 32 streams when it needs the first one (c10/cuda/CUDAStream.cpp, kStreamsPerPool).
_MIN_POOL_STREAMS: Final = 32

# Files with the functions that frameworks offer programs for the creation of streams.
_STREAM_FILE_PATTERN = re.compile(
    r"/torch/(?:cuda/(?:__init__|streams)|_streambase)\.py$|/cupy/cuda/stream|/cupyx?/cuda/"
    r"|/numba(?:_cuda/numba)?/cuda/|/cuda/(?:core|bindings)/|/cudakit/"
)


class RaceOwnership:
    """Decides the owner of one race. All occurrences of the race have the same two call stacks."""

    def __init__(self, current_stack: Sequence[Frame], previous_stack: Sequence[Frame]) -> None:
        entry_frames = library_entry(current_stack), library_entry(previous_stack)
        self.library = library_of(current_stack) or library_of(previous_stack)
        functions = {(frame.filename, frame.name) for frame in entry_frames if frame}
        self._calls_one_function = None not in entry_frames and len(functions) == 1
        self._is_of_program = not self.library
        # Streams of occurrences that belong to the library if the program never uses these streams.
        self._streams: set[tuple[StreamUse, int, int]] = set()

    def add(self, race: Race, stream_use: StreamUse) -> bool:
        """Add an occurrence. Return whether it is the first one that certainly belongs to the program."""
        was_of_program = self._is_of_program
        if was_of_program or (self._calls_one_function and is_one_program_call(race)):
            return False
        streams = race.current.stream, race.previous.stream
        if stream_use.are_library_streams(*streams):
            self._streams.add((stream_use, *streams))
        else:
            self._is_of_program = True
        return self._is_of_program

    @property
    def owner(self) -> RaceOwner:
        """The owner of the race: the program if at least one occurrence belongs to the program."""
        is_of_library = not self._is_of_program and all(
            stream_use.are_library_streams(*streams) for stream_use, *streams in self._streams
        )
        return RaceOwner.LIBRARY if is_of_library else RaceOwner.PROGRAM


class StreamUse:
    """Finds the streams that only libraries use, in the records of one trace."""

    def __init__(self) -> None:
        # Whether the innermost frame of each call stack is in the program's own code. Stack 0 is empty.
        self._is_called_by_program = np.zeros(1, np.bool_)
        # Program calls that created streams on which no work was enqueued yet, by stream number.
        self._unused_streams: dict[int, int] = {}
        # Streams that a library created and used for the first time during the same call by the program, with
        # the number of that call.
        self._library_streams: dict[int, int] = {}
        # Streams with which the program's own code called CUDA.
        self._program_streams: set[int] = set()
        # Program call and call stack that created each stream which a library created for itself.
        self._creations: dict[int, tuple[int, int]] = {}
        # Number of streams that a library created for itself, by program call and call stack.
        self._creation_counts: Counter[tuple[int, int]] = Counter()

    def feed(self, records: Records, stacks: Sequence[Stack]) -> None:
        """Add records. ``stacks`` is the stack table of their trace."""
        new_stacks = stacks[len(self._is_called_by_program) :]
        self._is_called_by_program = np.append(
            self._is_called_by_program,
            [bool(stack) and not is_library(stack[0].filename) for stack in new_stacks],
        ).astype(np.bool_)
        kinds = records["kind"]
        is_creation = kinds == EventKind.STREAM_CREATE
        self._add_created_streams(records[is_creation], stacks)
        if self._unused_streams:
            self._add_first_work(records[np.isin(kinds, _WORK_KINDS)])
        # The destructor of a library's object destroys the streams of the object, even if the
        # program's code runs it.
        is_destruction = kinds == EventKind.STREAM_DESTROY
        later_records = records[(records["stream"] != 0) & ~is_creation & ~is_destruction]
        # A damaged trace may refer to stacks that it does not have.
        site_indices = np.minimum(later_records["site"], len(self._is_called_by_program) - 1)
        program_records = later_records[self._is_called_by_program[site_indices]]
        self._program_streams.update(np.unique(program_records["stream"]).tolist())

    def are_library_streams(self, *streams: int) -> bool:
        """Return whether one program call created these streams for a library, and only it used them.

        The answer can change until the end of the trace, because the program may use a stream later.
        """
        program_calls = {self._library_streams.get(stream) for stream in streams}
        return (
            len(program_calls) == 1
            and None not in program_calls
            and not self._program_streams & set(streams)
        )

    def is_reachable(self, stream: int) -> bool:
        """Return whether the program has access to a stream, as far as its calls show.

        The program has no access to a stream that a library created for itself, unless the
        program's own code called CUDA with this stream. A call that creates many streams fills a
        pool, from which the program may get streams, too.
        """
        creation = self._creations.get(stream)
        is_from_pool = creation is not None and self._creation_counts[creation] >= _MIN_POOL_STREAMS
        return creation is None or is_from_pool or stream in self._program_streams

    def _add_created_streams(self, records: Records, stacks: Sequence[Stack]) -> None:
        for stream, program_call, site in records[["stream", "program_call", "site"]].tolist():
            has_stack = 0 < site < len(self._is_called_by_program)
            if not has_stack or self._is_called_by_program[site]:
                continue
            if program_call:
                self._unused_streams[stream] = program_call
            library_frames = takewhile(lambda frame: is_library(frame.filename), stacks[site])
            if not all(_STREAM_FILE_PATTERN.search(frame.filename) for frame in library_frames):
                self._creations[stream] = program_call, site
                self._creation_counts[program_call, site] += 1

    def _add_first_work(self, operations: Records) -> None:
        """Find the streams whose first work belongs to the program call that created the stream."""
        is_on_unused_stream = np.isin(operations["stream"], list(self._unused_streams))
        for stream, program_call in operations[is_on_unused_stream][
            ["stream", "program_call"]
        ].tolist():
            if self._unused_streams.pop(stream, 0) == program_call != 0:
                self._library_streams[stream] = program_call


# --- known races in libraries: patterns that recognize them, and advice until the libraries are fixed ---

# Number of frames of the library that are searched, from the innermost one outwards.
_MAX_FRAMES = 8


@dataclass(frozen=True, slots=True)
class _RaceSidePattern:
    """The pattern of one side of a known race."""

    file: str  # end of the path of a frame's file
    function: str  # last component of the name of the frame's function
    kernel: re.Pattern[str] | None = None  # pattern of the kernel; None for any operation

    def matches(self, side: Side) -> bool:
        """Return whether a side matches the pattern."""
        if self.kernel and not (side.kernel and self.kernel.search(side.kernel)):
            return False
        return any(
            frame.filename.endswith(self.file) and frame.name.rpartition(".")[2] == self.function
            for frame in side.stack[:_MAX_FRAMES]
        )


@dataclass(frozen=True, slots=True)
class _KnownRace:
    sides: tuple[_RaceSidePattern, _RaceSidePattern]  # patterns of both sides, in either order
    issue: KnownIssue


_CUPY_FFT = _RaceSidePattern("/cupy/fft/_fft.py", "_exec_fft")
_TORCH_FILL_KERNEL = re.compile(r"FillFunctor<long>")
_TORCH_GRAPHS_FILE = "/torch/cuda/graphs.py"

_KNOWN_RACES: Sequence[_KnownRace] = (
    # Confirmed with CuPy 14.2 on an H200: FFTs of 1,000,003 points on four streams give wrong values.
    _KnownRace(
        (_CUPY_FFT, _CUPY_FFT),
        KnownIssue(
            title="FFTs on several streams share the work area of a cached plan in CuPy",
            reference="https://github.com/cupy/cupy/issues/8079",
            advice="make one plan for each stream (cupyx.scipy.fft.get_fft_plan), or do not keep plans: "
            "cupy.fft.config.get_plan_cache().set_size(0)",
        ),
    ),
    # torch 2.11: capture_begin() fills the seed on the capture stream, replay() on the current one
    # (CUDAGeneratorState::replay_prologue of aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
    _KnownRace(
        (
            _RaceSidePattern(_TORCH_GRAPHS_FILE, "capture_begin", _TORCH_FILL_KERNEL),
            _RaceSidePattern(_TORCH_GRAPHS_FILE, "replay", _TORCH_FILL_KERNEL),
        ),
        KnownIssue(
            title="the first replay of a CUDA graph in PyTorch writes the random seed "
            "that its capture wrote",
            reference="torch.cuda.CUDAGraph.replay",
            advice="call torch.cuda.synchronize() between the capture and the first replay; both write the "
            "same seed unless it was changed in between",
        ),
    ),
)


def known_issue(current_side: Side, previous_side: Side) -> KnownIssue | None:
    """Return the known issue of a library that matches a race, or None."""
    for race in _KNOWN_RACES:
        for first_side, second_side in (
            (previous_side, current_side),
            (current_side, previous_side),
        ):
            first_pattern, second_pattern = race.sides
            if first_pattern.matches(first_side) and second_pattern.matches(second_side):
                return race.issue
    return None
