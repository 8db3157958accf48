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
    "--nodes", type=counts, metavar="N,...", help="How many kernels a graph has, as 1,10,100."
)
@click.option(
    "--steps",
    type=names,
    metavar="NAME,...",
    help="Some of capture, instantiate, launch, run, replay and eager; all if not given.",
)
@measuring
def graph(*, effort: Effort, **asked: Any) -> Spec:
    """Measure what graphs cost to make and to launch, and what they save.

    launch is the call that launches a graph, run the time of the device; replay and eager are what the
    host waits for, with a graph and without one.

    \b
    cudakit bench graph
    cudakit bench graph --topologies chain --nodes 1,10,100,1000
    """
    from cudakit.core.bench.spec import GraphSpec

    return GraphSpec(**given(**asked), **effort)
