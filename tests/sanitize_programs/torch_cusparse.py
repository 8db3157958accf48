"""Multiply a sparse matrix by a dense one by cuSPARSE; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

rows, columns = torch.randint(0, 1000, (2, 20_000), device="cuda")
weights = torch.rand(20_000, device="cuda")
sparse = torch.sparse_coo_tensor(torch.stack((rows, columns)), weights, (1000, 1000)).coalesce()
compressed = sparse.to_sparse_csr()


def multiply(dense):
    (compressed @ dense) + torch.sparse.mm(sparse, dense)


run_steps(multiply, torch.randn(1000, 64), race=sys.argv[1] == "race")
