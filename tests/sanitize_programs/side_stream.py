"""Copy the input of each step on a side stream: the part that the programs of libraries and models share."""

from __future__ import annotations

from collections.abc import Callable

import torch

STEPS = 4


def run_steps(
    step: Callable[..., object], *hosts: torch.Tensor, race: bool, steps: int = STEPS
) -> None:
    """Call ``step`` with copies of the pinned ``hosts`` on the device, once to warm up and then ``steps`` times.

    A side stream copies into the same device buffers before each step, and waits for the step before. The current
    stream waits for the copy, unless ``race``: then the kernels of the step read the buffers too early.
    """
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    pinned = [host.pin_memory() for host in hosts]
    buffers = [host.cuda() for host in hosts]
    step(*buffers)
    torch.cuda.synchronize()
    for _ in range(steps):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for buffer, host in zip(buffers, pinned, strict=True):
                buffer.copy_(host, non_blocking=True)
        if not race:
            main.wait_stream(side)
        # WRONG if race: the copies may still be running.
        step(*buffers)
    torch.cuda.synchronize()


def train(
    model: torch.nn.Module, *hosts: torch.Tensor, race: bool, loss: Callable[..., torch.Tensor]
) -> None:
    """Train ``model`` by SGD on ``loss(model, *inputs)``, whose inputs a side stream copies."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(*inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(model, *inputs).backward()
        optimizer.step()

    run_steps(step, *hosts, race=race)
