"""``cudakit bench copy``: how fast does the driver copy?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, cache_option, given, mode_option, names, sizes_option

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Spec


@click.command(short_help="Copies between host and device, within it, and to other devices.")
@click.option(
    "--directions",
    type=names,
    metavar="NAME,...",
    help="Some of h2d (from pinned memory of the host), d2h (to it), both (at the same time), pageable-h2d, "
    "pageable-d2h, d2d (within the device), peer (to each other device) and peer-both; all that the machine "
    "has if not given.",
)
@sizes_option("Bytes of each copy")
@mode_option("host for pageable memory and else isolated")
@cache_option("rotate within the device and else hot")
@measuring
def copy(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how fast the driver copies: between host and device, within the device, and to others.

    The limit is the link between host and device, that to other devices, or the memory of the device. Of
    copies both ways at the same time, the bytes of both count. Where two devices cannot reach each other,
    copies are staged by way of the host, and the column access says so.

    \b
    cudakit bench copy
    cudakit bench copy --directions h2d,d2h --sizes 4KiB..256MiB
    cudakit bench copy --directions peer,peer-both --sizes 1GiB
    """
    from cudakit.core.bench.spec import CopySpec

    return CopySpec(**given(**asked), **effort)
