"""Run the backward pass of a second model on another stream; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

models = [torch.nn.Linear(256, 256).cuda() for _ in range(2)]
other = torch.cuda.Stream()


def step(inputs):
    main = torch.cuda.current_stream()
    other.wait_stream(main)
    models[0](inputs).square().mean().backward()
    with torch.cuda.stream(other):
        models[1](inputs.sin()).square().mean().backward()
    main.wait_stream(other)


run_steps(step, torch.randn(64, 256), race=sys.argv[1] == "race")
