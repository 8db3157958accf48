"""Generate tokens greedily with a cache of keys and values; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import run_steps

embed, project, head = (
    torch.nn.Embedding(500, 128).cuda(),
    torch.nn.Linear(128, 384).cuda(),
    torch.nn.Linear(128, 500).cuda(),
)
keys, values = (torch.zeros(4, 8, 32, 16, device="cuda") for _ in range(2))


@torch.no_grad()
def generate(tokens):
    token = tokens[:, 0]
    for position in range(16):
        query, key, value = project(embed(token)).view(4, 3, 8, 16).unbind(1)
        keys[:, :, position], values[:, :, position] = key, value
        seen = slice(0, position + 1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, None], keys[:, :, seen], values[:, :, seen]
        )
        token = head(attended.flatten(1)).argmax(-1)


run_steps(generate, torch.randint(0, 500, (4, 1)), race=sys.argv[1] == "race", steps=2)
