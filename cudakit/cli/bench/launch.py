"""``cudakit bench launch``: how long do the calls take that launch and wait?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, given, names

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Spec


@click.command(short_help="Latencies of launches, events, waits and streams.")
@click.option(
    "--calls",
    type=names,
    metavar="NAME,...",
    help="Some of launch, launch-to-start, launch-to-finish, launch-back-to-back, event-record, "
    "stream-synchronize, event-create-destroy and stream-create-destroy; all if not given.",
)
@measuring
def launch(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how long calls take that launch kernels, wait for them, and make what that needs.

    \b
    cudakit bench launch
    cudakit bench launch --calls launch,launch-to-finish
    """
    from cudakit.core.bench.spec import LaunchSpec

    return LaunchSpec(**given(**asked), **effort)
