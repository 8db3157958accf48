"""One process prepares the batches: the GPU waits for each."""

import time

import torch
from torch.utils.data import DataLoader, Dataset

from timing import STEPS, run


class Batches(Dataset):
    """Batches that take 10 ms each to prepare."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        time.sleep(0.010)  # decode, augment
        return torch.full((1024, 1024), float(index))


weight = torch.rand(1024, 1024, device="cuda")


def step(batch):
    x = batch.to("cuda")
    for _ in range(100):
        x = torch.relu(x @ weight) / 1024


if __name__ == "__main__":
    run(step, DataLoader(Batches(), batch_size=None))
