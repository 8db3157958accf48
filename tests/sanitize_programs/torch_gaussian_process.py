"""Fit a Gaussian process by a Cholesky factor; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

scale = torch.ones((), device="cuda", requires_grad=True)
optimizer = torch.optim.Adam([scale], lr=0.01)


def fit(points, values):
    optimizer.zero_grad()
    covariance = torch.exp(-torch.cdist(points, points).square() / scale)
    factor = torch.linalg.cholesky(covariance + 0.1 * torch.eye(len(points), device="cuda"))
    alpha = torch.cholesky_solve(values, factor)
    (values.mT @ alpha + 2 * factor.diagonal().log().sum()).sum().backward()
    optimizer.step()


run_steps(fit, torch.rand(500, 3), torch.rand(500, 1), race=sys.argv[1] == "race")
