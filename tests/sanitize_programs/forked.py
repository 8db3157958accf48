"""A forked child uses CUDA, then its parent does; with ``race`` the streams of the child race."""

from __future__ import annotations

import multiprocessing
import sys

import torch

SIZE = 1 << 20


def prefetch(*, ordered: bool) -> None:
    side = torch.cuda.Stream()
    host = torch.ones(SIZE, pin_memory=True)
    with torch.cuda.stream(side):
        batch = host.to("cuda", non_blocking=True)
    if ordered:
        torch.cuda.current_stream().wait_stream(side)
    print(f"sum: {(batch * 2).sum().item():.0f}", flush=True)


child = multiprocessing.get_context("fork").Process(
    target=prefetch, kwargs={"ordered": sys.argv[1] != "race"}
)
child.start()
child.join()
prefetch(ordered=True)
sys.exit(child.exitcode)
