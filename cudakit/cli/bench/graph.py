"""``cudakit bench graph``: what do graphs cost, and what do they save?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, counts, given, names

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Spec


@click.command(short_help="What graphs cost to make and launch, and what they save.")
@click.option(
    "--topologies",
    type=names,
    metavar="NAME,...",
    help="chain, fork-join, or both if not given.",
)
@click.option(
    "--nodes", type=counts, metavar="N,...", help="How many nodes a graph has, as 1,10,100."
)
@click.option(
    "--nodes-of",
    "kinds",
    type=names,
    metavar="NAME,...",
    help="What nodes are: kernel, fill or copy, of 16 bytes each; kernel if not given.",
)
@click.option(
    "--steps",
    type=names,
    metavar="NAME,...",
    help="Some of capture, instantiate, update, upload, first-launch, launch, run, replay and eager; "
    "all if not given.",
)
@measuring
def graph(*, effort: Effort, **asked: Any) -> Spec:
    """Measure what graphs cost to make and to launch, and what they save.

    update gives a graph other parameters (the whole of it), first-launch is the launch of one that was
    not uploaded, launch the call once it was. run is the time of the device; replay and eager are what
    the host waits for, with a graph and without one, and take turns.

    \b
    cudakit bench graph
    cudakit bench graph --topologies chain --nodes 1,10,100,1000
    cudakit bench graph --nodes-of kernel,fill,copy --steps launch,run
    """
    from cudakit.core.bench.spec import GraphSpec

    return GraphSpec(**given(**asked), **effort)
