"""Train with automatic mixed precision and a gradient scaler; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler()


def step(inputs):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(inputs).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


run_steps(step, torch.randn(64, 512), race=sys.argv[1] == "race")
