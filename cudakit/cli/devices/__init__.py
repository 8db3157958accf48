"""``cudakit devices``: list the GPUs with their indices and current state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cudakit.cli.devices.options import View, seconds, select_options, view_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import OutputOptions, gpu_option, output_options
from cudakit.cli.output import open_output

if TYPE_CHECKING:
    from cudakit.core.devices.select import SelectSpec


@click.command()
@output_options
@view_options
@click.option("--watch", type=seconds, metavar="SEC", help="Look again every SEC seconds.")
@select_options
@click.option("--list-fields", is_flag=True, help="List all fields and what they mean.")
@gpu_option
def devices(
    *,
    view: View,
    watch: float | None,
    spec: SelectSpec | None,
    list_fields: bool,
    gpu: str,
    output: OutputOptions,
) -> int:
    """Show which GPU is which, and how each one fares.

    CUDA, NVML (nvidia-smi) and PCI number devices differently: all three stand side by side, and
    devices that CUDA_VISIBLE_DEVICES hides are there too. Nothing is changed, no context is made.

    \b
    cudakit devices --processes --topology
    cudakit devices --watch 1
    cudakit devices --fields name,power_draw_w --format csv
    CUDA_VISIBLE_DEVICES=$(cudakit devices --select --min-free-mem 10GiB) python train.py
    """
    if watch and (view.long or view.topology or spec):
        raise click.UsageError("--watch shows what moves: not --long, --topology or --select")
    from cudakit.core.devices.fields import named

    wanted = named(view.names)
    with open_output(output.path, force=output.force) as target:
        from cudakit.gpu.machine import open_machine

        machine = None if list_fields else open_machine(gpu)
        # Imported while the child process queries the driver.
        from cudakit.cli.devices import show

        if machine is None:
            show.list_fields(target, view)
        elif spec:
            show.print_selection(machine, target, view, spec)
        elif watch:
            show.watch_devices(machine, show.Writer(target, view, wanted, watching=True), watch)
        else:
            show.show_once(machine, show.Writer(target, view, wanted))
    return ExitCode.OK
