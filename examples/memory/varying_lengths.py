"""Serve requests of varying lengths until no free block is large enough for the next one.

    cudakit run --memory --snapshot varying_lengths.pkl varying_lengths.py    # runs out of memory
    cudakit memviz varying_lengths.pkl
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python varying_lengths.py   # serves all requests

The server admits a request only if all caches together take at most 80% of the memory of the GPU. It runs out
of memory nevertheless: caches of finished requests leave free blocks of many sizes between the used blocks.
"""

import random

import torch

LAYERS = 2
REQUESTS = 200
MIN_LENGTH, MAX_LENGTH = 4, 64  # in blocks of tokens
DEVICE_BYTES = torch.cuda.mem_get_info()[1]
BUDGET_BYTES = 8 * DEVICE_BYTES // 10
WEIGHT_BYTES = DEVICE_BYTES // 50
# A request of the longest prompt takes 6.4 % of the memory of the GPU.
BLOCK_BYTES = DEVICE_BYTES // 4000

Cache = list[torch.Tensor]


def load_weights() -> list[torch.Tensor]:
    return [torch.zeros(WEIGHT_BYTES, dtype=torch.uint8, device="cuda") for _ in range(4)]


def prefill(length: int) -> Cache:
    """Return the keys and values of a prompt of ``length`` blocks of tokens."""
    activations = torch.zeros(4 * length * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    cache = []
    for _ in range(LAYERS):
        keys = torch.empty(length * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        values = torch.empty(length * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        keys.copy_(activations[: keys.numel()])
        values.copy_(activations[-values.numel() :])
        cache += [keys, values]
    return cache


def main() -> None:
    rng = random.Random(0)
    weights = load_weights()
    sessions: list[Cache] = []
    for _ in range(REQUESTS):
        length = rng.randint(MIN_LENGTH, MAX_LENGTH)
        needed_bytes = 2 * LAYERS * length * BLOCK_BYTES
        while used_bytes(weights, *sessions) + needed_bytes > BUDGET_BYTES:
            sessions.pop(rng.randrange(len(sessions)))
        sessions.append(prefill(length))
    torch.cuda.synchronize()
    print("served", REQUESTS, "requests;", len(sessions), "are still open")


def used_bytes(*caches: Cache) -> int:
    return sum(tensor.numel() for cache in caches for tensor in cache)


main()
