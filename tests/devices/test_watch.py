from __future__ import annotations

from dataclasses import replace

import pytest
from devices.machines import (
    GIB,
    FakeMachine,
    cuda,
    cuda_gpu,
    gpu,
    nvml,
    read_devices,
    telemetry_of,
    three_gpus,
)

from cudakit.devices.result import Device, DevicesResult
from cudakit.devices.watch import (
    History,
    Quit,
    WatchView,
    arrange,
    averages,
    live_report,
    memory_share,
    sm_activity,
    sparkline,
)
from cudakit.gpu.api.facts import Process
from cudakit.report.document import Note, Ratio, Section, Table, Text
from cudakit.units import Unavailable

SECOND = 10**9


def three_devices() -> DevicesResult:
    """Return three devices whose utilization rises and whose memory use falls with the NVML index."""
    telemetry_reads = {
        index: [
            telemetry_of(
                utilization_gpu_percent=10 * index,
                memory_used_bytes=(30 - 10 * index) * GIB,
                power_draw_w=(100.0, 300.0, 200.0)[index],
            )
        ]
        for index in range(3)
    }
    return read_devices(three_gpus(telemetry_reads=telemetry_reads))


def indices(result: DevicesResult) -> list[object]:
    return [device.nvml_index for device in result.devices]


def typed(view: WatchView, keys: str) -> WatchView:
    for key in keys:
        view = view.press(key)
    return view


# --- keys ------------------------------------------------------------------------------------------


def test_key_q_quits() -> None:
    with pytest.raises(Quit):
        WatchView().press("q")


def test_key_s_cycles_through_sort_orders() -> None:
    views = [typed(WatchView(), "s" * count) for count in range(6)]

    assert [view.sort for view in views] == [
        "index",
        "SM",
        "memory",
        "temperature",
        "power",
        "index",
    ]


def test_key_p_toggles_processes() -> None:
    assert WatchView().press("p").shows_processes
    assert not typed(WatchView(), "pp").shows_processes


def test_filter_takes_every_key_until_enter() -> None:
    view = typed(WatchView(), "/sqp\r")

    assert (view.pattern, view.is_editing, view.sort) == ("sqp", False, "index")


def test_filter_is_edited_with_backspace_and_cleared_with_escape() -> None:
    assert typed(WatchView(), "/ab\x7fc").pattern == "ac"
    assert typed(WatchView(), "/ab\x1b") == WatchView()
    assert typed(WatchView(), "/ab\r\x1b") == WatchView()


def test_unknown_key_changes_nothing() -> None:
    assert WatchView().press("x") == WatchView()


def test_help_names_sort_order_and_filter() -> None:
    assert "sort (by SM)" in WatchView(sort="SM").help
    assert "filter (h200)" in WatchView(pattern="h200").help
    assert WatchView(pattern="h2", is_editing=True).help.startswith("filter: h2_")


# --- sorting and filtering -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("index", [0, 1, 2]),
        ("SM", [2, 1, 0]),
        ("memory", [0, 1, 2]),
        ("power", [1, 2, 0]),
    ],
)
def test_devices_are_sorted_with_largest_value_first(sort: str, order: list[int]) -> None:
    assert indices(arrange(three_devices(), WatchView(sort=sort))) == order


@pytest.mark.parametrize(
    ("pattern", "remaining"), [("", [0, 1, 2]), ("card 1", [1]), ("CUDA:0", [1]), ("none", [])]
)
def test_pattern_keeps_devices_whose_name_contains_it(pattern: str, remaining: list[int]) -> None:
    assert indices(arrange(three_devices(), WatchView(pattern=pattern))) == remaining


def test_pattern_keeps_devices_with_matching_process() -> None:
    training = Process(1, "compute", 1, "python train.py", "ada")
    machine = replace(three_gpus(), process_list=(training,))

    result = read_devices(machine, processes=True)

    assert indices(arrange(result, WatchView(pattern="train"))) == [0, 1, 2]
    assert indices(arrange(result, WatchView(pattern="grace"))) == []


# --- history ---------------------------------------------------------------------------------------


def device(**fields: object) -> Device:
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [telemetry_of(**fields)]})  # type: ignore[arg-type]
    (devices_found,) = read_devices(machine).devices
    return devices_found


def test_history_drops_samples_older_than_a_minute() -> None:
    history, result = History(), three_devices()
    for second in (0, 30, 61, 90):
        history.add_samples(replace(result, time_ns=second * SECOND))

    assert [sample.time_ns // SECOND for sample in history.samples(result.devices[0])] == [
        30,
        61,
        90,
    ]


def test_sm_activity_falls_back_to_utilization() -> None:
    assert sm_activity(device(utilization_gpu_percent=30)) == 0.3
    assert sm_activity(device(sm_activity_percent=74.0)) == 0.74
    assert sm_activity(device(utilization_gpu_percent=Unavailable("MIG"))) == Unavailable("MIG")


def test_memory_share_is_of_total_memory() -> None:
    assert memory_share(device(memory_used_bytes=20 * GIB)) == 0.25
    assert memory_share(device(memory_used_bytes=Unavailable("no"))) == Unavailable("no")


def test_averages_are_means_of_equal_parts_of_a_minute() -> None:
    samples = [(0, 1.0), (31 * SECOND, 0.2), (40 * SECOND, 0.4), (59 * SECOND, Unavailable("no"))]

    devices_found = list(averages(samples, now_ns=60 * SECOND, interval_count=4))

    assert devices_found == [None, None, pytest.approx(0.3), None]


def test_sparkline_has_one_character_per_part() -> None:
    assert sparkline([None, 0.0, 0.5, 1.0, 2.0]) == "·▁▅██"


@pytest.mark.parametrize(("width", "count"), [(80, 14), (100, 24), (200, 30), (40, 8)])
def test_live_report_has_bars_and_history_of_fitting_length(width: int, count: int) -> None:
    history, result = History(), three_devices()
    history.add_samples(result)

    page = live_report(result, history, WatchView(), width=width, with_keys=True)

    section = next(node for node in page.nodes if isinstance(node, Section))
    (table,) = section.nodes
    assert isinstance(table, Table)
    name, use, use_history, memory, _ = table.rows[1]
    assert (name, use, memory) == (Text("cuda:0"), Ratio(0.1), Ratio(0.25))
    assert isinstance(use_history, Text)
    assert use_history.value == "·" * (count - 1) + "▂"
    last = page.nodes[-1]
    assert isinstance(last, Note)
    assert last.text == WatchView().help


def test_live_report_without_keyboard_names_no_keys() -> None:
    result = three_devices()

    page = live_report(result, History(), WatchView(), width=80, with_keys=False)

    assert not [node for node in page.nodes if isinstance(node, Note) and "keys" in node.text]


def test_processes_read_for_the_filter_are_not_shown() -> None:
    result = three_devices()
    training = Process(1, "compute", 1, "python train.py", "ada")
    devices = tuple(replace(device, processes=(training,)) for device in result.devices)
    view = WatchView(pattern="train")

    page = live_report(replace(result, devices=devices), History(), view, width=80, with_keys=False)

    assert view.needs_processes
    assert "Processes" not in [node.title for node in page.nodes if isinstance(node, Section)]


def test_history_of_utilization_has_caption() -> None:
    page = live_report(three_devices(), History(), WatchView(), width=80, with_keys=False)

    (section,) = [node for node in page.nodes if isinstance(node, Section)]
    (table,) = section.nodes
    assert isinstance(table, Table)
    assert table.caption == "For devices with ~ above, SM is that share of time."
