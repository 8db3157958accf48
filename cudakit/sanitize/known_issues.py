"""Known races in libraries: patterns that recognize the races, and advice until the libraries are fixed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cudakit.sanitize.result import KnownIssue, Side

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
        first_pattern, second_pattern = race.sides
        if (first_pattern.matches(previous_side) and second_pattern.matches(current_side)) or (
            first_pattern.matches(current_side) and second_pattern.matches(previous_side)
        ):
            return race.issue
    return None
