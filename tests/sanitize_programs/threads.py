"""Two host threads, each with its own stream, pass buffers back and forth; ``race`` omits the events."""

from __future__ import annotations

import sys
import threading
from queue import Queue

import torch

TURNS, SIZE = 50, 1 << 20

ordered = sys.argv[1] != "race"
full: Queue[tuple[torch.Tensor, torch.cuda.Event] | None] = Queue()
empty: Queue[tuple[torch.Tensor, torch.cuda.Event]] = Queue()
totals: list[torch.Tensor] = []


def handed_over(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    return buffer, torch.cuda.current_stream().record_event()


def taken(item: tuple[torch.Tensor, torch.cuda.Event]) -> torch.Tensor:
    buffer, event = item
    if ordered:
        torch.cuda.current_stream().wait_event(event)
    return buffer


def produce() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        host = torch.ones(SIZE, pin_memory=True)
        for _ in range(TURNS):
            buffer = taken(empty.get())
            buffer.copy_(host, non_blocking=True)
            full.put(handed_over(buffer))
        full.put(None)
        torch.cuda.current_stream().synchronize()


def consume() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        while item := full.get():
            buffer = taken(item)
            totals.append(buffer.sum())
            empty.put(handed_over(buffer))
        torch.cuda.current_stream().synchronize()


for _ in range(2):
    empty.put(handed_over(torch.zeros(SIZE, device="cuda")))
torch.cuda.synchronize()
workers = [threading.Thread(target=produce), threading.Thread(target=consume)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print(f"{len(totals)} turns")
