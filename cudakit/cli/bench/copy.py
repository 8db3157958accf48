"""``cudakit bench copy``: how fast does the driver copy?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, cache_option, given, mode_option, names, sizes_option

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Spec


@click.command(short_help="Copies between pinned host memory and device, and within it.")
@click.option(
    "--directions",
    type=names,
    metavar="NAME,...",
    help="Some of h2d (from the host), d2h (to it), both (at the same time) and d2d (within the "
    "device); all if not given.",
)
@sizes_option("Bytes of each copy")
@mode_option("isolated")
@cache_option("rotate within the device and else hot")
@measuring
def copy(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how fast the driver copies, between pinned host memory and device, and within the device.

    The limit is the link between host and device, or the memory of the device. Of copies both ways at
    the same time, the bytes of both count.

    \b
    cudakit bench copy
    cudakit bench copy --directions h2d,d2h --sizes 4KiB..256MiB
    """
    from cudakit.core.bench.spec import CopySpec

    return CopySpec(**given(**asked), **effort)
