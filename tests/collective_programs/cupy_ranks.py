"""Two ranks of NCCL in one process, through CuPy: python cupy_ranks.py [bug]"""

from __future__ import annotations

import sys

import cupy
from cupy.cuda import nccl

STEPS, ELEMENTS, RANKS = 4, 1 << 20, 2


def main() -> None:
    has_bug = "bug" in sys.argv[1:]
    communicators = nccl.NcclCommunicator.initAll(list(range(RANKS)))
    parts, streams = [], []
    for rank in range(RANKS):
        with cupy.cuda.Device(rank):
            parts.append(cupy.full(ELEMENTS, rank + 1, cupy.float32))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.Device(rank).synchronize()
    for _ in range(STEPS):
        nccl.groupStart()
        for rank, (communicator, part, stream) in enumerate(
            zip(communicators, parts, streams, strict=True)
        ):
            with cupy.cuda.Device(rank):
                communicator.allReduce(
                    part.data.ptr,
                    part.data.ptr,
                    ELEMENTS,
                    nccl.NCCL_FLOAT32,
                    nccl.NCCL_SUM,
                    stream.ptr,
                )
        nccl.groupEnd()
        for rank, (part, stream) in enumerate(zip(parts, streams, strict=True)):
            with cupy.cuda.Device(rank):
                if not has_bug:
                    stream.synchronize()
                part *= 0.5  # WRONG with the bug: the all-reduce may not have ended
                cupy.cuda.Device(rank).synchronize()
    print([float(part[0]) for part in parts])


if __name__ == "__main__":
    main()
