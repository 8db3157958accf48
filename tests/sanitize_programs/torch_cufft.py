"""Transform a signal forth and back by cuFFT, with gradients; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps


def transform(signal):
    signal = signal.detach().requires_grad_()
    spectrum = torch.fft.rfft2(signal) * 0.5
    torch.fft.irfft2(spectrum, s=signal.shape[-2:]).square().sum().backward()


run_steps(transform, torch.randn(4, 300, 1000), race=sys.argv[1] == "race")
