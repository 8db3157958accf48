"""The two streams run at the same time."""

import torch

from timing import run

first, second = torch.cuda.Stream(), torch.cuda.Stream()


def step():
    for _ in range(20):
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000)  # a kernel of one thread
        with torch.cuda.stream(second):
            torch.cuda._sleep(200_000)


run(step)
