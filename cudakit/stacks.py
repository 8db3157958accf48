"""Call stacks, and the one rule which frames belong to libraries and which frame is the user's line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a call stack; ``line`` 0 means unknown (C++ without debug information)."""

    name: str  # function
    filename: str  # path of the source file
    line: int  # line number; 0: unknown


# A call stack, innermost frame first; empty if none was recorded.
Stack: TypeAlias = tuple[Frame, ...]


# The name of the innermost frame of work that a thread of autograd enqueued; call_sites.c of the recorder
# writes it. The outer frames are those of the call that started the backward pass.
BACKWARD_FRAME = "backward pass (autograd thread)"

# The two patterns are also POSIX extended regular expressions: the recorder gets them for its own frames.
LIBRARY_FILE = "|".join(
    (
        r"(^|/)(site|dist)-packages/",  # installed packages
        r"/lib(64)?/python3[.0-9]*t?(\.zip)?/",  # the standard library
        # cudakit itself, also outside site-packages; old logs have core and run
        "/cudakit/(allocator|api|arrays|bench|core|devices|gpu|memory|profile|record|run|sanitize|trace)/",
        r"^<",  # generated code, except for TYPED_CODE
        r"^(\?\?)?$",  # unknown
        r"\.(c|cc|cpp|cxx|cu|h|hpp|so[.0-9]*)$",  # native code
    )
)
TYPED_CODE = "^<(stdin>|string>|ipython)"

_LIBRARY_FILE = re.compile(LIBRARY_FILE)
_TYPED_CODE = re.compile(TYPED_CODE)
_PACKAGE = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)|/(cudakit)/[^/]+/")

# These frames belong to PyTorch's recorder and allocator, not to the caller.
_ALLOCATOR_FUNCTION = re.compile(
    r"torch::(?:unwind|CapturedTraceback)|c10::|at::(?:detail|_ops|native)::empty|at::empty"
)


@lru_cache(maxsize=1 << 14)
def is_library(filename: str) -> bool:
    """Return whether a file belongs to a library, the interpreter, cudakit or native code."""
    return bool(_LIBRARY_FILE.search(filename)) and not _TYPED_CODE.match(filename)


def call_site_index(stack: Sequence[Frame]) -> int:
    """Return the index of the call site, the user's line: the innermost frame with the lowest ``site_rank``.

    It is 0 for the empty stack.
    """
    return min(range(len(stack)), key=lambda index: site_rank(stack[index]), default=0)


def site_rank(frame: Frame) -> int:
    """Return how unlikely a frame is the call site.

    0 is a frame of the program; 1 a frame of ``<string>``, which a library may have generated, too; 2 a frame
    of a library; 3 one of PyTorch's allocator, or the mark of a backward pass.
    """
    if not is_library(frame.filename):
        return int(frame.filename == "<string>")
    if frame.name == BACKWARD_FRAME or _ALLOCATOR_FUNCTION.match(frame.name):
        return 3
    return 2


def frame_text(frame: Frame) -> str:
    """Return a frame with its whole path: ``/home/me/train.py:12 step``."""
    location = f"{frame.filename}:{frame.line}" if frame.line else frame.filename
    return f"{location} {frame.name}".strip()


def library_name(filename: str) -> str:
    """Return the top-level package of a library's file, such as ``torch``; "" if it is in none."""
    match = _PACKAGE.search(filename) if is_library(filename) else None
    return (match[1] or match[2]) if match else ""


def is_backward(stack: Sequence[Frame]) -> bool:
    """Return whether a thread of autograd enqueued the work, for a backward pass."""
    return bool(stack) and stack[0].name == BACKWARD_FRAME
