"""The output of ``cudakit devices`` without ``--watch``."""

from __future__ import annotations

from dataclasses import replace

import click

from cudakit.cli.devices.options import View
from cudakit.cli.output import Outputs, Report
from cudakit.devices.query import open_query
from cudakit.devices.result import DevicesResult, FieldsList, FieldsResult, field_registry
from cudakit.devices.select import SelectSpec, filter_devices, select
from cudakit.gpu.api.facts import FieldInfo, Machine
from cudakit.report.document import Document


def list_fields(outputs: Outputs) -> None:
    """Write the list of all fields."""
    from cudakit.devices.report import field_list

    fields = tuple(field_registry().values())
    outputs.write(
        Report(
            result=FieldsList(fields),
            document=lambda: field_list(fields),
            brief_sentences=lambda: [f"{field.name}: {field.description}" for field in fields],
        )
    )


def print_selection(machine: Machine, outputs: Outputs, view: View, spec: SelectSpec) -> None:
    """Write a value for CUDA_VISIBLE_DEVICES."""
    result = open_query(machine).read()
    selected_devices = select(result, filter_devices(result, view.ids), spec)
    _warn_simulated(machine)
    variable_value = selected_devices.visible_devices
    outputs.write(
        Report(
            result=selected_devices,
            document=lambda: Document(variable_value, ()),
            exports={"txt": lambda: f"{variable_value}\n"},
        )
    )


def show_once(
    machine: Machine, outputs: Outputs, view: View, selected_fields: tuple[FieldInfo, ...]
) -> None:
    """Write the current state of the devices."""
    result = open_query(machine).read(
        activity=counts_activity(selected_fields), processes=view.processes, topology=view.topology
    )
    filtered_result = replace(result, devices=filter_devices(result, view.ids))
    # Only CSV does not say that the GPUs are simulated: with a CSV file, the summary on the terminal does.
    if "csv" in outputs.terminal_formats:
        _warn_simulated(machine)
    outputs.write(report_of(filtered_result, view, selected_fields))


def counts_activity(selected_fields: tuple[FieldInfo, ...], *, watching: bool = False) -> bool:
    """Return whether the output includes activity since the last read of the counters."""
    if selected_fields:
        return any(field.kind == "activity" for field in selected_fields)
    return watching


def _warn_simulated(machine: Machine) -> None:
    """Warn on stderr that the GPUs are simulated, because a plain list of fields cannot say so."""
    if machine.simulated:
        click.echo("cudakit: these GPUs and CUDA_VISIBLE_DEVICES are simulated", err=True)


def report_of(
    result: DevicesResult,
    view: View,
    selected_fields: tuple[FieldInfo, ...],
    *,
    watching: bool = False,
) -> Report:
    """Return the report of the devices, or of the selected fields."""
    from cudakit.devices.report import field_columns, field_table, report

    chosen = FieldsResult(
        result.simulated,
        result.time_ns,
        tuple(
            {field.name: device.field(field.name) for field in selected_fields}
            for device in result.devices
        ),
    )
    return Report(
        result=chosen if selected_fields else result,
        document=lambda: (
            field_table(selected_fields, result)
            if selected_fields
            else report(result, with_all_fields=view.long, with_activity=watching)
        ),
        rows=lambda: field_columns(selected_fields or tuple(field_registry().values()), result),
    )
