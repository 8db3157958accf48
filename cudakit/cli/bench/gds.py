"""``cudakit bench gds``: benchmark transfers between files and device memory."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudakit.bench.gds import DIRECTIONS, GdsSpec, temporary_data_file
from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.options import (
    EFFORT_OPTIONS,
    HELP_BY_TITLE,
    make_spec,
    parse_names,
    spec_options,
)
from cudakit.cli.failure import sigterm_as_interrupt
from cudakit.cli.options import (
    FILE,
    Command,
    Value,
    byte_size,
    gpu_option,
    option,
    output_options,
    with_options,
)
from cudakit.cli.output import OutputOptions
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.cli.failure import ExitCode

_FILE_BYTES = 1 << 30
_SIMULATED_FILE_BYTES = 4 << 20


@click.command(
    cls=Command,
    help_by_title=HELP_BY_TITLE,
    short_help="Rate of transfers between files and device memory (GPUDirect Storage).",
)
@option(
    "--path",
    "directory",
    type=FILE,
    metavar="DIR",
    default=".",
    help="Directory of the file that is read and written. The file is deleted at the end.  [default: .]",
)
@option(
    "--file-size",
    type=Value((), byte_size),
    metavar="SIZE",
    help="Bytes of the file.  [default: 1GiB; with --gpu sim 4MiB]",
)
@option(
    "--directions",
    type=Value(DIRECTIONS, parse_names, is_list=True),
    metavar="NAME,...",
    default="read",
    help="Directions: read (file to device), write (device to file).  [default: read]",
)
@partial(with_options, (*spec_options(GdsSpec), gpu_option, *EFFORT_OPTIONS))
@output_options(FORMATS)
def gds(
    *,
    directory: str,
    file_size: int | None,
    directions: tuple[str, ...],
    gpu: str,
    output: OutputOptions,
    **options: Any,
) -> ExitCode:
    """Measure transfers between files and device memory by cuFile, pread and pwrite.

    The baseline, posix, uses pread and pwrite with a copy through pinned host memory. Samples are
    interleaved. The result says which path cuFile used: direct (GPUDirect Storage) or compatibility (through
    host memory, as without the driver nvidia-fs), and whether O_DIRECT bypassed the page cache. All values
    are compared with the content of the file. The peak is that of the GPU's link to the host; most drives are
    slower.

    \b
    cudakit bench gds --path /mnt/nvme
    cudakit bench gds --directions read,write --sizes 64KiB..16MiB:4 --threads 16
    """
    if file_size == 0:
        raise UsageError("--file-size is 0; it must be at least 1 byte")
    default_bytes = _SIMULATED_FILE_BYTES if gpu.startswith("sim") else _FILE_BYTES
    with sigterm_as_interrupt(), ExitStack() as cleanup:
        files = {
            direction: cleanup.enter_context(
                temporary_data_file(
                    Path(directory),
                    file_size or default_bytes,
                    options["seed"] or 0,
                    in_memory=_is_in_memory(Path(directory)),
                )
            )
            for direction in directions
        }
        return measure_spec(make_spec(GdsSpec, gpu, options, files=files), gpu, output)


def _is_in_memory(directory: Path) -> bool:
    """Return whether a directory is on tmpfs or ramfs; False if it does not exist."""
    from cudakit.gpu.host import Files

    try:
        return Files(Path("/")).is_in_memory(directory.stat().st_dev)
    except OSError:
        return False
