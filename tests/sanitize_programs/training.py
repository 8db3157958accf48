"""Train for 300 steps on batches that a prefetch stream copies; ``race`` omits the wait for the copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH, FEATURES, CLASSES = 300, 256, 1024, 10


def batches() -> Iterator[list[torch.Tensor]]:
    """Yield pinned batches, made by two worker processes."""
    size = STEPS * BATCH
    images = torch.randint(0, 256, (size // 10, FEATURES), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (size // 10,))
    loader = DataLoader(
        TensorDataset(images, labels), BATCH, shuffle=True, num_workers=2, pin_memory=True
    )
    for _ in range(10):
        yield from loader


def prefetched(*, ordered: bool) -> Iterator[list[torch.Tensor]]:
    """Copy each batch on a side stream while the one before is trained on."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def copied(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.stream(side):
            return [tensor.to("cuda", non_blocking=True) for tensor in batch]

    source = batches()
    coming = copied(next(source))
    for following in source:
        if ordered:
            main.wait_stream(side)
        for tensor in coming:
            tensor.record_stream(main)
        batch, coming = coming, copied(following)
        yield batch


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, CLASSES),
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    loss = torch.zeros(())
    for step, (images, labels) in enumerate(prefetched(ordered=sys.argv[1] != "race")):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.float() / 255), labels)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step}: {loss.item():.4f}")
    print(f"end: {loss.item():.4f}")


if __name__ == "__main__":
    main()
