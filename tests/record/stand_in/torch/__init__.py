"""Stands in for torch: its functions that run a backward pass, and nothing else."""

from torch import _C as _C
from torch import autograd as autograd
