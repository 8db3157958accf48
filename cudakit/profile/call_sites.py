"""Format call stacks and their call sites."""

from __future__ import annotations

from cudakit.stacks import Frame, Stack, call_site_index

NO_STACK = "no call stack recorded"


def frame_text(frame: Frame) -> str:
    """Return a frame as "train.py:12 step"."""
    location = f"{frame.filename}:{frame.line}" if frame.line else frame.filename
    return f"{location} {frame.name}".strip()


def call_site(stack: Stack) -> str:
    """Return the call site of a stack as text."""
    return frame_text(stack[call_site_index(stack)]) if stack else NO_STACK


def call_path(stack: Stack) -> list[str]:
    """Return the frames of a call stack as texts, the outermost first."""
    return [frame_text(frame) for frame in reversed(stack)] or [NO_STACK]
