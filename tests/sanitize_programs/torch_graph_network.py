"""Sum messages along the edges of a graph, forward and backward; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

edges = torch.randint(0, 2000, (2, 16_000), device="cuda")
model = torch.nn.Linear(32, 32).cuda()


def loss(model, nodes):
    messages = model(nodes)[edges[0]]
    sums = torch.zeros_like(nodes).index_add(0, edges[1], messages)
    highest = torch.full_like(nodes, -1e9).scatter_reduce(
        0, edges[1][:, None].expand_as(messages), messages, "amax"
    )
    return (sums + highest).square().mean()


train(model, torch.randn(2000, 32), race=sys.argv[1] == "race", loss=loss)
