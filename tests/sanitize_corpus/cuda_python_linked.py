"""race: A kernel walks a linked list and modifies a node that another stream reads.

fixed: A kernel walks a linked list and modifies its nodes; another stream reads memory outside all
  nodes.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
struct node { node *next; long long number; };
extern "C" __global__ void link(node *nodes, long long step)
{
    for (long long i = 0; i < 100; i += step)
        nodes[i].next = i + step < 100 ? &nodes[i + step] : nullptr;
}
extern "C" __global__ void walk(node *first)
{
    for (node *at = first; at; at = at->next)
        at->number += 1;
}
extern "C" __global__ void copy(const node *from, long long *to) { *to = from->number; }
"""
open_device()
first, second = stream(), stream()
module = compiled(SOURCE)
nodes, copied = zeros(16 * 100), zeros(8)
launch(function(module, "link"), first, 1, 1, nodes, 3)
call(driver.cuCtxSynchronize())

launch(function(module, "walk"), first, 1, 1, nodes)
# WRONG if race: node 51 is in the list.
launch(function(module, "copy"), second, 1, 1, nodes + 16 * (51 if race else 50), copied)
call(driver.cuCtxSynchronize())
