from __future__ import annotations

import io
import os
import time
import tty
from itertools import islice

import pytest
from devices.machines import FakeMachine, cuda, cuda_gpu, gpu, nvml, telemetry_of

from cudakit.cli.devices.show import Writer, _read_keys, ticks, watch_devices
from cudakit.cli.output import Output
from cudakit.devices.result import fields_by_name
from cudakit.devices.select import View
from cudakit.devices.watch import Quit
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import DeviceFacts, Process
from cudakit.units import Unavailable

LOST = Unavailable("the GPU has fallen off the bus")


def output() -> tuple[io.StringIO, Output]:
    stream = io.StringIO()
    return stream, Output(stream, "memory", 100, color=False)


def view(*names: str) -> View:
    return View((), names, long=False, processes=False, topology=False)


def test_pipe_gets_reports_appended_without_keys() -> None:
    machine = FakeMachine(
        nvml(gpu(0)),
        cuda(cuda_gpu(0, 0)),
        {0: [telemetry_of(power_draw_w=100.0), telemetry_of(), LOST]},
    )
    stream, target = output()

    with pytest.raises(EnvironmentUnusable):
        watch_devices(machine, [Writer(target, "txt", view(), ())], 0.01)
    assert stream.getvalue().count("GPUs of this machine") == 2
    assert "keys:" not in stream.getvalue()


def test_filter_by_process_reads_hidden_processes() -> None:
    reads = []

    class Machine(FakeMachine):
        def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
            reads.append(device.index)
            return super().processes(device)

    keys = iter(["/", "p", "q", "\r", "q"])
    _, target = output()

    watch_devices(
        Machine(nvml(gpu(0)), cuda(cuda_gpu(0, 0))),
        [Writer(target, "txt", view(), ())],
        60,
        lambda _: next(keys),
    )
    assert reads == [0]


def test_quiet_watch_writes_one_line_per_device() -> None:
    machine = FakeMachine(
        nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [telemetry_of(), telemetry_of(), LOST]}
    )
    stream, target = output()

    with pytest.raises(EnvironmentUnusable):
        watch_devices(machine, [Writer(target, "txt", view(), (), is_brief=True)], 0.01)
    title, device_line, *_ = stream.getvalue().splitlines()
    assert title.startswith("GPUs of this machine")
    assert device_line.startswith("CUDA 0, NVML 0, ")


def test_key_q_ends_the_wait_and_the_watch() -> None:
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)))
    _, target = output()

    start = time.monotonic()
    watch_devices(machine, [Writer(target, "txt", view(), ())], 60, lambda _: "q")
    assert time.monotonic() - start < 30


def test_closed_terminal_ends_the_watch() -> None:
    keyboard, typing = os.openpty()
    tty.setcbreak(typing)
    os.write(keyboard, b"s")
    assert _read_keys(typing, 1) == "s"
    assert _read_keys(typing, 0) == ""
    os.write(keyboard, b"\x1b[A")
    assert _read_keys(typing, 1) == ""
    os.close(keyboard)

    with pytest.raises(Quit):
        _read_keys(typing, 1)
    os.close(typing)


def test_ticks_start_at_once_and_keep_interval() -> None:
    start = time.monotonic()

    assert list(islice(ticks(0.05, quick_first=False), 3)) == [0, 2, 3]
    assert 0.1 <= time.monotonic() - start < 30


def test_counters_get_early_second_tick() -> None:
    start = time.monotonic()

    assert list(islice(ticks(60, quick_first=True), 2)) == [0, 1]
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("form", ["txt", "json"])
def test_lost_gpu_is_shown_and_ends_watch(form: str) -> None:
    telemetry_reads = [telemetry_of(power_draw_w=100.0), telemetry_of(power_draw_w=200.0), LOST]
    machine = FakeMachine(
        nvml(gpu(0), gpu(1)), cuda(cuda_gpu(0, 0), cuda_gpu(1, 1)), {1: telemetry_reads}
    )
    stream, target = output()

    with pytest.raises(
        EnvironmentUnusable, match="lost: cuda:1 = nvml:1 = GPU-1a1b0000"
    ) as failure:
        watch_devices(machine, [Writer(target, form, view(), ())], 0.01)
    assert failure.value.exit_code == 3
    assert "dmesg" in failure.value.hint
    shown = stream.getvalue()
    assert "has fallen off the bus" in shown
    assert "200" in shown


def test_watching_plain_fields_needs_no_early_second_read() -> None:
    machine = FakeMachine(
        nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [telemetry_of(power_draw_w=5.0), LOST]}
    )
    stream, target = output()
    names = ("power_draw_w",)

    with pytest.raises(EnvironmentUnusable):
        watch_devices(machine, [Writer(target, "csv", view(*names), fields_by_name(names))], 0.01)
    assert stream.getvalue() == 'power_draw_w\r\n5.0\r\n""\r\n'
