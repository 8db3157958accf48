"""Generate tokens with a key-value cache that grows until the GPU is full.

    cudakit run --memory --snapshot kv_cache.pkl kv_cache.py    # runs out of memory
    cudakit memviz kv_cache.pkl
    python kv_cache.py fixed                                       # keeps only the newest tokens

Each step appends the keys and values of the new tokens to the cache of every layer. The sizes depend on the
memory of the GPU, so that the program fails after about 40 steps on any GPU.
"""

import sys

import torch

LAYERS = 4
HEADS = 16
HEAD_SIZE = 128
STEPS = 50
NEW_TOKENS = 16
DEVICE_BYTES = torch.cuda.mem_get_info()[1]
# After 45 steps the cache alone would take the memory of the GPU: keys and values of bfloat16.
BATCH = max(1, DEVICE_BYTES // (45 * LAYERS * 2 * HEADS * HEAD_SIZE * NEW_TOKENS * 2))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HEADS * HEAD_SIZE, 2 * HEADS * HEAD_SIZE)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
        new_keys, new_values = self.project(hidden).chunk(2, dim=-1)
        self.keys = append(self.keys, new_keys, window)
        self.values = append(self.values, new_values, window)
        # The attention of the newest token stands for the attention of all new tokens.
        weights = torch.softmax((self.keys * new_keys[:, -1:]).sum(-1, keepdim=True), dim=1)
        return hidden + (weights * self.values).sum(1, keepdim=True)


def append(cache: torch.Tensor | None, new: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the cache with the new tokens; only the newest ``window`` tokens, unless it is None."""
    tokens = new.contiguous() if cache is None else torch.cat((cache, new), dim=1)
    return tokens if window is None else tokens[:, -window:].clone()


@torch.no_grad()
def main() -> None:
    window = 16 * NEW_TOKENS if sys.argv[1:] == ["fixed"] else None
    layers = [Layer().to("cuda", torch.bfloat16) for _ in range(LAYERS)]
    hidden = torch.randn(BATCH, NEW_TOKENS, HEADS * HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    for step in range(STEPS):
        with torch.profiler.record_function(f"step {step}"):
            for layer in layers:
                hidden = layer(hidden, window)
    torch.cuda.synchronize()
    print("generated", STEPS * NEW_TOKENS, "tokens for", BATCH, "sequences")


main()
