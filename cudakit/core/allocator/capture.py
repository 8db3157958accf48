"""Which requests belong to a capture or to a thread."""

from __future__ import annotations

import threading

from cudakit.core.allocator.private import Takes
from cudakit.core.allocator.reuse import CaptureGraph


def of_this_thread() -> Takes:
    """Take the requests of the thread that calls this."""
    own = threading.get_ident()
    return lambda stream: threading.get_ident() == own  # noqa: ARG005


def of_capture(stream: int | None, graph: CaptureGraph | None) -> Takes:
    """Take the requests on the streams that are in the same capture as one.

    Without a graph, which alone can say what these are, all of this thread and all on that stream: a request
    too many costs memory, one too few would let others have what the graph uses when it runs.
    """
    own = of_this_thread()
    if stream is None:
        return own
    if graph is None:
        return lambda other: other == stream or own(other)

    def takes(other: int) -> bool:
        capture = graph.capture(other)
        return capture is not None and capture == graph.capture(stream)

    return takes
