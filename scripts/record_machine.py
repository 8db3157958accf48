"""Record the GPUs of this machine in a file from which ``--gpu sim:MODEL`` simulates such GPUs.

    python scripts/record_machine.py cudakit/gpu/models/NAME.json "one line about the machine"

Activity is measured between two reads, one second apart: start a load on the GPUs first. UUIDs, serial
numbers, users, commands and paths are replaced by invented values of the same form.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView, Process
from cudakit.gpu.machine import Record, dumps, loads, open_machine
from cudakit.gpu.machine import record as record_machine
from cudakit.units import Unavailable

SERIAL = "1650000000000"
LIBRARY_DIRECTORY = "/usr/lib/x86_64-linux-gnu"


def record(about: str) -> Record:
    machine = open_machine()
    record_machine(machine)  # Takes the first sample of the activity counters.
    time.sleep(1)
    machine_record = record_machine(machine)
    return replace(
        anonymized(machine_record), about={**date_and_driver(machine_record), "machine": about}
    )


def date_and_driver(record: Record) -> dict[str, str]:
    driver = record.nvml.driver_version if isinstance(record.nvml, NvmlView) else "unknown"
    return {"date": datetime.now(UTC).date().isoformat(), "driver": str(driver)}


def anonymized(record: Record) -> Record:
    """Return a record without the values that identify the machine and its users."""
    text = dumps(record)
    for number, uuid in enumerate(sorted(uuids(record))):
        text = text.replace(uuid[4:], f"{number:08x}-5eed-4c0d-a517-{number:012x}")
    without_uuids = loads(text)
    return replace(
        without_uuids,
        nvml=_anonymous_nvml(without_uuids.nvml),
        cuda=_anonymous_cuda(without_uuids.cuda),
        processes=tuple(map(_anonymous_processes, without_uuids.processes)),
    )


def uuids(record: Record) -> set[str]:
    views = [view for view in (record.nvml, record.cuda) if not isinstance(view, Unavailable)]
    devices = [device for view in views for device in view.devices]
    return {device.uuid for device in devices if isinstance(device.uuid, str)}


def _anonymous_nvml(view: NvmlView | Unavailable) -> NvmlView | Unavailable:
    if isinstance(view, Unavailable):
        return view
    return replace(view, devices=tuple(map(_with_invented_serial, view.devices)))


def _with_invented_serial(device: DeviceFacts) -> DeviceFacts:
    if isinstance(device.fields.get("serial"), Unavailable):
        return device
    return replace(device, fields={**device.fields, "serial": SERIAL})


def _anonymous_cuda(view: CudaView | Unavailable) -> CudaView | Unavailable:
    if isinstance(view, Unavailable) or isinstance(view.libcuda, Unavailable):
        return view
    return replace(view, libcuda=f"{LIBRARY_DIRECTORY}/{Path(view.libcuda).name}")


def _anonymous_processes(
    processes: tuple[Process, ...] | Unavailable,
) -> tuple[Process, ...] | Unavailable:
    if isinstance(processes, Unavailable):
        return processes
    return tuple(
        replace(process, pid=4001 + index, user="ada", name="python train.py")
        for index, process in enumerate(processes)
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(dumps(record(sys.argv[2])), encoding="utf-8")
