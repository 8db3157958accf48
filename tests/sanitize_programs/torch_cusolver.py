"""Factorize and solve by cuSOLVER, with gradients; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps


def solve(matrix):
    matrix = matrix.detach().requires_grad_()
    positive = matrix @ matrix.mT + 64 * torch.eye(64, device="cuda")
    factor = torch.linalg.cholesky(positive)
    solution = torch.cholesky_solve(matrix, factor) + torch.linalg.solve(positive, matrix)
    (solution.square().mean() + torch.linalg.eigvalsh(positive).sum()).backward()
    with torch.no_grad():
        torch.linalg.qr(matrix), torch.linalg.svd(matrix)


run_steps(solve, torch.randn(4, 64, 64), race=sys.argv[1] == "race")
