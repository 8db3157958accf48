"""``cudakit devices``: list the GPUs with their indices and current state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from cudakit.cli.devices.options import View, seconds, select_options, view_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    Command,
    Value,
    gpu_option,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, open_outputs, suffixes

if TYPE_CHECKING:
    from cudakit.devices.select import SelectSpec


_FORMATS = (*COMMON_FORMATS, "csv")
_WATCH_FORMATS = ("json", "txt", "csv")
_SELECT_FORMATS = ("json", "txt")
_OTHER_OPTIONS = option_group(
    "What to show",
    option("--list-fields", is_flag=True, help="List all fields with their units and meaning."),
    option(
        "--watch",
        type=Value((), seconds),
        metavar="SEC",
        help="Update every SEC seconds, until q or Ctrl-C. JSON has one line per update.",
    ),
    gpu_option,
)


@click.command(cls=Command)
@output_options(
    _FORMATS,
    format_limits=f"With --watch: {suffixes(_WATCH_FORMATS)}. With --select: {suffixes(_SELECT_FORMATS)}.",
)
@view_options
@partial(with_options, _OTHER_OPTIONS)
@select_options
def devices(
    *,
    view: View,
    watch: float | None,
    spec: SelectSpec | None,
    list_fields: bool,
    gpu: str,
    output: OutputOptions,
) -> int:
    """List GPUs with their CUDA, NVML and PCI indices and current state.

    CUDA, NVML (nvidia-smi) and PCI number devices differently: the report shows all three, and also the
    devices that CUDA_VISIBLE_DEVICES hides. The command changes nothing and creates no CUDA context. With
    --gpu sim, CUDA_VISIBLE_DEVICES is simulated too: its value on this machine has no effect.

    With --watch on a terminal (except with TERM=dumb), the report has bars, a history of one minute, and
    keys: s sorts, / filters by device or process, p shows processes, q quits.

    \b
    cudakit devices --processes --topology
    cudakit devices --watch 1
    cudakit devices --fields name,power_draw_w --format csv
    CUDA_VISIBLE_DEVICES=$(cudakit devices --select) python train.py
    """
    if watch and (view.long or view.topology or spec):
        raise click.UsageError("--watch cannot be combined with --long, --topology or --select")
    if list_fields and (watch or spec or view != View((), (), False, False, False)):
        raise click.UsageError("--list-fields lists all fields; remove the other options")
    refuser = "--select" if spec else "--fields" if view.names else ""
    for name in ("long", "processes", "topology"):
        if refuser and getattr(view, name):
            raise click.UsageError(f"--{name} has no effect with {refuser}")
    if spec and view.names:
        raise click.UsageError("--fields has no effect with --select")
    from cudakit.devices.result import fields_by_name

    selected_fields = fields_by_name(view.names)
    formats = _WATCH_FORMATS if watch else _SELECT_FORMATS if spec else None
    with open_outputs(output, formats) as outputs:
        from cudakit.gpu.machine import open_machine

        machine = None if list_fields else open_machine(gpu)
        # This slow import runs while the child process queries the driver.
        from cudakit.cli.devices import show

        if machine is None:
            show.list_fields(outputs)
        elif spec:
            show.print_selection(machine, outputs, view, spec)
        elif watch:
            writers = [
                show.Writer(
                    target,
                    output_format,
                    view,
                    selected_fields,
                    is_brief=output.quiet and not output.targets,
                )
                for output_format, target in outputs.streams()
            ]
            with show.keyboard() as wait_for_keys:
                show.watch_devices(machine, writers, watch, wait_for_keys)
            outputs.close()
        else:
            show.show_once(machine, outputs, view, selected_fields)
    return ExitCode.OK
