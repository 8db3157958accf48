"""Names in a trace: short forms of the names of kernels, and the NVTX ranges that are open at each record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import Records, take_records, view

MAX_KERNEL_NAME_LENGTH = 80

# Levels of detail of a shortened name, the most detailed level first. A level consists of the depth to which
# template arguments are shown, the number of argument types per depth, and whether namespaces are shown.
_DETAIL_LEVELS = (
    (9, 99, True),
    (2, 1, True),
    (2, 1, False),
    (1, 1, True),
    (0, 0, True),
    (0, 0, False),
)

_OPENING, _CLOSING = "<({[", ">)}]"
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|\[\]|->\*?|<=>|<<=?|>>=?|[<>]=?)\s?")
_ABI_TAG = re.compile(r"\[abi:[^\]]*\]")
_NUMBER = re.compile(r"(-?\d+)u?l{0,2}")
_CAST = re.compile(r"\([^()]*\)(?=\w)")  # the cast in an enumerator such as (Mode)2
_AFTER_PARAMETERS = re.compile(r"\)( const| \[clone [^\]]*\])*$")


def short_kernels(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each kernel; equal ones of different kernels are numbered: ``add<…> #2``."""
    short_names: dict[str, str] = {}
    counts = Counter[str]()
    for name in dict.fromkeys(names):
        short_names[name] = short_name = short_kernel(name)
        counts[short_name] += 1
    numbers = Counter[str]()
    for name, short_name in short_names.items():
        if counts[short_name] > 1:
            numbers[short_name] += 1
            short_names[name] = f"{short_name} #{numbers[short_name]}"
    return short_names


def short_kernel(name: str, *, max_length: int = MAX_KERNEL_NAME_LENGTH) -> str:
    """Shorten a demangled kernel name: ``at::native::vectorized_kernel<4, add<float>, …>``.

    Drops the parameters, the namespaces of template arguments, and template arguments until the name fits.
    A lambda or local type is replaced by the function that contains it.
    """
    kernel_name = _OPERATOR.sub("operator", _ABI_TAG.sub("", name))
    if not _is_balanced(kernel_name):
        return cut(kernel_name, max_length)
    *outer_scopes, last_scope = _split_outside_brackets(_without_signature(kernel_name), "::")
    # Only the last scope keeps its template arguments.
    enclosing_scopes = [
        scope.partition("<")[0] for scope in outer_scopes if not scope.startswith("(")
    ]
    for max_depth, max_types, is_qualified in _DETAIL_LEVELS:
        short_name = "::".join(
            (
                *(enclosing_scopes if is_qualified else ()),
                _shorten_template(last_scope, max_depth, max_types),
            )
        )
        if len(short_name) <= max_length:
            return short_name
    return cut(short_name, max_length)


def cut(text: str, max_length: int) -> str:
    """Cut the middle out of a text that is too long, because kernel names differ at both ends."""
    if len(text) <= max_length:
        return text
    head_length = (max_length - 1) // 2
    return f"{text[:head_length]}…{text[len(text) - (max_length - 1 - head_length) :]}"


def _without_signature(kernel_name: str) -> str:
    """Remove the result type and the parameters: ``void f<int>(int)`` becomes ``f<int>``."""
    if _AFTER_PARAMETERS.search(kernel_name):
        kernel_name = kernel_name[: _positions_outside_brackets(kernel_name, "(")[-1]]
    return kernel_name[max(_positions_outside_brackets(kernel_name, " "), default=-1) + 1 :]


def _shorten_template(text: str, max_depth: int, max_types: int) -> str:
    """Return a name with its template arguments, of which at most ``max_types`` are types."""
    name, opening_bracket, after_name = text.partition("<")
    if not opening_bracket or ">" not in after_name:
        return text
    arguments_text, _, after_arguments = after_name.rpartition(">")
    if max_depth == 0:
        return f"{name}<…>{after_arguments}"
    arguments = [argument.strip() for argument in _split_outside_brackets(arguments_text, ",")]
    type_indices = [
        index for index, argument in enumerate(arguments) if not _NUMBER.fullmatch(argument)
    ]
    shown_end = type_indices[max_types] if len(type_indices) > max_types else len(arguments)
    shown_arguments = [
        _shorten_argument(argument, max_depth - 1, max_types) for argument in arguments[:shown_end]
    ]
    ellipsis = ["…"] if shown_end < len(arguments) else []
    return f"{name}<{', '.join(shown_arguments + ellipsis)}>{after_arguments}"


def _shorten_argument(text: str, max_depth: int, max_types: int) -> str:
    """Return a template argument without namespaces."""
    if number_match := _NUMBER.fullmatch(text):
        return number_match[1]
    scopes = _split_outside_brackets(_CAST.sub("", text), "::")
    local_scope = next((scope for scope in scopes if _is_function(scope)), None)
    if local_scope is None:
        return _shorten_template(scopes[-1], max_depth, max_types)
    return _shorten_template(_without_signature(local_scope), max_depth, max_types)


def _is_function(scope: str) -> bool:
    return not scope.startswith(("(", "{")) and bool(_AFTER_PARAMETERS.search(scope))


def _split_outside_brackets(text: str, separator: str) -> list[str]:
    part_ends = [*_positions_outside_brackets(text, separator), len(text)]
    part_begins = [0, *(end + len(separator) for end in part_ends[:-1])]
    return [text[begin:end] for begin, end in zip(part_begins, part_ends, strict=True)]


def _positions_outside_brackets(text: str, substring: str) -> list[int]:
    """Return the positions at which a text contains ``substring`` outside all brackets."""
    depth, positions = 0, []
    for index, character in enumerate(text):
        if depth == 0 and text.startswith(substring, index):
            positions.append(index)
        depth += (character in _OPENING) - (character in _CLOSING)
    return positions


def _is_balanced(text: str) -> bool:
    open_brackets: list[str] = []
    for character in text:
        if character in _OPENING:
            open_brackets.append(character)
        elif character in _CLOSING and (
            not open_brackets or _OPENING.index(open_brackets.pop()) != _CLOSING.index(character)
        ):
            return False
    return not open_brackets


# --- Follow the named ranges of NVTX through a trace, to find the ranges that are open at each record ---
#
# The ranges of a thread nest within each domain. Ranges of the process have numbers, may be ended by any
# thread, and are open for all threads.

# Maximum number of ranges that are open at once, in each thread and in the process. Further ranges are
# ignored, so that programs that never end their ranges do not use ever more memory.
_MAX_OPEN_RANGES: Final = 1024
# Plain integers are faster to compare than enumerations.
_PUSH: Final = int(EventKind.RANGE_PUSH)
_POP: Final = int(EventKind.RANGE_POP)


@dataclass(frozen=True, slots=True)
class OpenRange:
    """An open NVTX range, and the ranges that contain it."""

    name: int  # index of the name in the string table
    domain: int  # index of the domain's name in the string table; 0 for NVTX's default domain
    outer_range: OpenRange | None = None  # range that contains this range

    def __iter__(self) -> Iterator[OpenRange]:
        """Yield this range and the ranges that contain it, the innermost first."""
        open_range: OpenRange | None = self
        while open_range:
            yield open_range
            open_range = open_range.outer_range


# The innermost range that is open at each record.
OpenRanges: TypeAlias = npt.NDArray[np.object_]


class _Range(NamedTuple):
    name: int
    domain: int


class _ThreadRanges:
    """The open ranges of one thread."""

    __slots__ = ("nested_ranges", "ranges")

    def __init__(self) -> None:
        self.ranges: list[_Range] = []  # outermost first
        # The first of ``ranges``, each with the ranges that contain it, computed when a record needs them.
        self.nested_ranges: list[OpenRange] = []

    def push(self, new_range: _Range) -> None:
        if len(self.ranges) < _MAX_OPEN_RANGES:
            self.ranges.append(new_range)

    def pop(self, domain: int) -> None:
        """Remove the innermost range of a domain, if there is one."""
        for index in reversed(range(len(self.ranges))):
            if self.ranges[index].domain == domain:
                del self.ranges[index]
                del self.nested_ranges[index:]
                return

    def innermost(self, process_range: OpenRange | None) -> OpenRange | None:
        """Return the innermost range; ``process_range``, which contains all of them, if there is none."""
        nested_ranges = self.nested_ranges
        for name, domain in self.ranges[len(nested_ranges) :]:
            outer_range = nested_ranges[-1] if nested_ranges else process_range
            nested_ranges.append(OpenRange(name, domain, outer_range))
        return nested_ranges[-1] if nested_ranges else process_range


class RangeTracker:
    """Tracks the open NVTX ranges of one trace, whose records are passed in the order of their calls."""

    def __init__(self) -> None:
        # Ranges of the process by number, in the order in which they began.
        self._process_ranges: dict[int, _Range] = {}
        self._innermost_process_range: OpenRange | None = None
        # Ranges of each thread that has open ranges.
        self._thread_ranges: dict[int, _ThreadRanges] = {}

    def follow(self, records: Records) -> OpenRanges | None:
        """Return the innermost range that is open at each call; None if no call has an open range.

        Accesses and other records that are no calls have None.
        """
        kinds = records["kind"]
        is_change = (kinds == EventKind.RANGE_PUSH) | (kinds == EventKind.RANGE_POP)
        if not self._process_ranges and not self._thread_ranges and not is_change.any():
            return None
        is_call = (kinds != EventKind.ACCESS) & (kinds != EventKind.ACCESSED) & ~is_change
        columns = _changes_and_calls(take_records(records, is_change | is_call))
        ranges_of_calls: list[OpenRange | None] = []
        for kind, thread, name, domain, range_number in zip(*columns.tolist(), strict=True):
            if kind == _PUSH:
                self._push(thread, _Range(name, domain), range_number)
            elif kind == _POP:
                self._pop(thread, domain, range_number)
            else:
                thread_ranges = self._thread_ranges.get(thread)
                process_range = self._innermost_process_range
                ranges_of_calls.append(
                    thread_ranges.innermost(process_range) if thread_ranges else process_range
                )
        innermost_ranges = np.empty(len(records), np.object_)
        innermost_ranges[is_call] = ranges_of_calls
        return innermost_ranges

    def _push(self, thread: int, new_range: _Range, range_number: int) -> None:
        if not range_number:
            self._thread_ranges.setdefault(thread, _ThreadRanges()).push(new_range)
        elif len(self._process_ranges) < _MAX_OPEN_RANGES:
            self._process_ranges[range_number] = new_range
            self._nest_process_ranges()

    def _pop(self, thread: int, domain: int, range_number: int) -> None:
        if range_number:
            self._process_ranges.pop(range_number, None)
            self._nest_process_ranges()
        elif thread_ranges := self._thread_ranges.get(thread):
            thread_ranges.pop(domain)
            if not thread_ranges.ranges:
                del self._thread_ranges[thread]

    def _nest_process_ranges(self) -> None:
        """Compute the innermost range of the process after a change: the ranges of all threads are in it."""
        self._innermost_process_range = None
        for name, domain in self._process_ranges.values():
            self._innermost_process_range = OpenRange(name, domain, self._innermost_process_range)
        for thread_ranges in self._thread_ranges.values():
            thread_ranges.nested_ranges.clear()


def _changes_and_calls(records: Records) -> npt.NDArray[np.int64]:
    """Return the kind, thread, name, domain and number of ranges' begins and ends, and of calls, as columns.

    Of a call, the name, domain and number have no meaning. An end has no name. Ranges of threads that contain
    no call, as most ranges of JAX, are left out.
    """
    kinds = records["kind"]
    pushes, pops = view(records, EventKind.RANGE_PUSH), view(records, EventKind.RANGE_POP)
    is_push = kinds == EventKind.RANGE_PUSH
    names = np.where(is_push, pushes["name"], 0)
    domains = np.where(is_push, pushes["domain"], pops["domain"])
    range_numbers = np.where(is_push, pushes["number"], pops["number"])
    columns = np.array([kinds, records["thread"], names, domains, range_numbers], np.int64)
    while True:
        kinds, threads, _, domains, range_numbers = columns
        is_empty_range = (
            (kinds[:-1] == EventKind.RANGE_PUSH)
            & (kinds[1:] == EventKind.RANGE_POP)
            & (threads[:-1] == threads[1:])
            & (domains[:-1] == domains[1:])
            & (range_numbers[:-1] == 0)
            & (range_numbers[1:] == 0)
        )
        if not is_empty_range.any():
            return columns
        is_dropped = np.append(is_empty_range, False)
        is_dropped[1:] |= is_empty_range
        columns = columns[:, ~is_dropped]
