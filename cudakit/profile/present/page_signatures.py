"""The signatures of GPU work for the interactive page, and the call tree that they refer to.

Work with the same call stack, name and launch configuration has the same signature. The page computes the
times of kernels, call sites and call stacks from the times of signatures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudakit.profile.call_sites import call_site_index
from cudakit.profile.exports.tracks import distinct_rows
from cudakit.profile.present.page_columns import cut_text
from cudakit.profile.timeline import Column, Timeline, WorkKind
from cudakit.report.document import Array
from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import Frame

_LAUNCH_COLUMNS = (
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "registers",
    "shared",
)


class CallTree:
    """The call tree of all stacks. Node 0 is the root, and a node's number is higher than its parent's."""

    def __init__(self) -> None:
        self.parents, self.node_frames = [0], [0]
        self.frames: dict[tuple[str, str, int], int] = {("", "", 0): 0}
        self._children: dict[tuple[int, int], int] = {}

    def frame(self, frame: Frame) -> int:
        """Return the number of a frame."""
        frame_key = (cut_text(frame.function), cut_text(frame.file), frame.line)
        return self.frames.setdefault(frame_key, len(self.frames))

    def child(self, parent: int, frame: Frame) -> int:
        """Return the node of a call below a node."""
        child_key = (parent, self.frame(frame))
        if child_key not in self._children:
            self._children[child_key] = len(self.parents)
            self.parents.append(parent)
            self.node_frames.append(child_key[1])
        return self._children[child_key]

    def add_stack(self, stack: Sequence[Frame]) -> int:
        """Add the frames of a stack, and return the node of its innermost frame."""
        node = 0
        for frame in reversed(stack):
            node = self.child(node, frame)
        return node


class Signatures:
    """Numbers the signatures of the work of all processes."""

    def __init__(self, tree: CallTree) -> None:
        self._tree = tree
        # The number of each signature. A signature is a node of the call tree, a name, the frame of the
        # call site, and a launch configuration.
        self._signatures: dict[tuple[int, int, int, int], int] = {}
        self._launches: dict[tuple[int, ...], int] = {(0,) * len(_LAUNCH_COLUMNS): 0}

    def of_work(self, process_timeline: Timeline, names: Column, nodes: Column) -> Column:
        """Return the signature of each piece of work.

        ``names`` has the number of each name of the process, ``nodes`` the node of each call stack.
        """
        work = process_timeline.work
        columns = (work.site, work.name, self._launches_of_work(process_timeline))
        first_rows, row_numbers = distinct_rows(*columns)
        signatures = []
        for site, name, launch in zip(
            *(column[first_rows].tolist() for column in columns), strict=True
        ):
            leaf_node = self._tree.child(
                int(nodes[site]), Frame(process_timeline.names[name], "", 0)
            )
            signature = (
                leaf_node,
                int(names[name]),
                self._call_site(process_timeline.stacks[site]),
                launch,
            )
            signatures.append(self._signatures.setdefault(signature, len(self._signatures)))
        return np.array(signatures, np.int64)[row_numbers]

    def _call_site(self, stack: Sequence[Frame]) -> int:
        """Return the number of the frame of a stack's call site; 0 for an empty stack."""
        return self._tree.frame(stack[call_site_index(stack)]) if stack else 0

    def _launches_of_work(self, process_timeline: Timeline) -> Column:
        """Return the number of the launch configuration of each piece of work; 0 for copies and memsets."""
        work = process_timeline.work
        is_kernel = work.kind == WorkKind.KERNEL
        kernels = process_timeline.activities.records_of(EventKind.KERNEL_RUN)[
            work.record[is_kernel]
        ]
        columns = [
            *(kernels["grid"][:, axis] for axis in range(3)),
            *(kernels["block"][:, axis] for axis in range(3)),
            kernels["registers"],
            kernels["shared_bytes"],
        ]
        first_rows, row_numbers = distinct_rows(*columns)
        rows = zip(*(column[first_rows].tolist() for column in columns), strict=True)
        launches = [self._launches.setdefault(row, len(self._launches)) for row in rows]
        launch_of_work = np.zeros(len(is_kernel), np.int64)
        launch_of_work[is_kernel] = np.array(launches, np.int64)[row_numbers]
        return launch_of_work

    def arrays(self) -> dict[str, Array]:
        """Return the columns of the signatures, of the nodes of the call tree, and of the launches."""
        signatures = np.array(list(self._signatures), np.int64).reshape(-1, 4)
        launches = np.array(list(self._launches), np.int64)
        return {
            "signature_node": signatures[:, 0],
            "signature_name": signatures[:, 1],
            "signature_site": signatures[:, 2],
            "signature_launch": signatures[:, 3],
            "node_parent": np.array(self._tree.parents, np.int64),
            "node_frame": np.array(self._tree.node_frames, np.int64),
            **{f"launch_{name}": launches[:, i] for i, name in enumerate(_LAUNCH_COLUMNS)},
        }
