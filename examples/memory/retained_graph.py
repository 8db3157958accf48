"""Validate a model and accidentally keep the autograd graph of every batch.

    cudakit run --memory --snapshot retained_graph.pkl retained_graph.py    # runs out of memory
    cudakit memviz retained_graph.pkl
    python retained_graph.py fixed                                             # adds plain numbers

The sum of the losses is a tensor that belongs to the graph of every batch, so that the activations of all
batches stay alive. The sizes depend on the memory of the GPU: the program fails after about 40 batches.
"""

import sys

import torch

WIDTH = 4096
LAYERS = 6
BATCHES = 60
DEVICE_BYTES = torch.cuda.mem_get_info()[1]
# The activations of 40 batches would take the memory of the GPU: two tensors of float32 for each layer.
ROWS = max(1, DEVICE_BYTES // (40 * LAYERS * 2 * WIDTH * 4))


def main() -> None:
    fixed = sys.argv[1:] == ["fixed"]
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers).cuda()
    total: torch.Tensor | float = 0.0
    for _ in range(BATCHES):
        batch = torch.randn(ROWS, WIDTH, device="cuda")
        loss = validate(model, batch)
        total = total + (loss.item() if fixed else loss)
    print("mean loss", float(total) / BATCHES)


def validate(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch), batch)


torch.backends.cuda.matmul.allow_tf32 = True
main()
