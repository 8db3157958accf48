"""Two streams of small kernels wait for each other after each kernel, although they are independent."""

import torch

from timing import run

first, second = torch.cuda.Stream(), torch.cuda.Stream()


def step():
    for _ in range(20):
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000)  # a kernel of one thread
        second.wait_stream(first)
        with torch.cuda.stream(second):
            torch.cuda._sleep(200_000)
        first.wait_stream(second)


run(step)
