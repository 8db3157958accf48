"""Denoise images with a small U-Net; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

down = torch.nn.Conv2d(3, 32, 3, padding=1).cuda()
middle = torch.nn.Conv2d(32, 32, 3, padding=1).cuda()
up = torch.nn.Conv2d(64, 3, 3, padding=1).cuda()


@torch.no_grad()
def denoise(images):
    for step in range(3):
        wide = torch.nn.functional.silu(down(images))
        small = middle(torch.nn.functional.avg_pool2d(wide, 2))
        large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
        noise = torch.randn_like(images) * 0.1 * step
        images = images - up(torch.cat((wide, large), 1)) + noise


run_steps(denoise, torch.randn(2, 3, 64, 64), race=sys.argv[1] == "race")
