"""``cudakit bench gds``: benchmark transfers between files and device memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.options import (
    HELP_BY_TITLE,
    Effort,
    effort_options,
    name_list,
    parse_counts,
    passed_options,
    sizes_option,
)
from cudakit.cli.failure import sigterm_as_interrupt
from cudakit.cli.options import FILE, Command, Value, byte_size, gpu_option, option, output_options
from cudakit.cli.output import OutputOptions

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
    type=name_list("cudakit.bench.workloads.gds:STORAGE_DIRECTIONS"),
    metavar="NAME,...",
    default="read",
    help="Directions: read (file to device), write (device to file).  [default: read]",
)
@option(
    "--patterns",
    type=name_list("cudakit.bench.workloads.gds:PATTERNS"),
    metavar="NAME,...",
    help="Order of the file offsets: sequential, random.  [default: both]",
)
@sizes_option("Bytes of each transfer", default="64KiB,1MiB,16MiB; with --gpu sim 4KiB,64KiB")
@option(
    "--threads",
    type=Value((), parse_counts),
    metavar="N,...",
    help="Numbers of threads that transfer at the same time.  [default: 1,8; with --gpu sim 1,2]",
)
@gpu_option
@effort_options
@output_options(FORMATS)
def gds(
    *,
    directory: str,
    file_size: int | None,
    directions: tuple[str, ...],
    effort: Effort,
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
    from cudakit.bench.data_file import temporary_data_file
    from cudakit.bench.workloads.gds import GdsSpec
    from cudakit.errors import UsageError

    if file_size == 0:
        raise UsageError("--file-size is 0; it must be at least 1 byte")
    default_bytes = _SIMULATED_FILE_BYTES if gpu.startswith("sim") else _FILE_BYTES
    with sigterm_as_interrupt(), ExitStack() as cleanup:
        files = {
            direction: cleanup.enter_context(
                temporary_data_file(
                    Path(directory),
                    file_size or default_bytes,
                    effort.spec_options.get("seed") or 0,
                    in_memory=_is_in_memory(Path(directory)),
                )
            )
            for direction in directions
        }
        spec = GdsSpec(files=files, **passed_options(**options), **effort.arguments(GdsSpec))
        return measure_spec(spec, gpu, output)


def _is_in_memory(directory: Path) -> bool:
    """Return whether a directory is on tmpfs or ramfs; False if it does not exist."""
    from cudakit.gpu.host import Files

    try:
        return Files(Path("/")).is_in_memory(directory.stat().st_dev)
    except OSError:
        return False
