"""Tests of the profile page in Chromium: its drawings, its sums, and hostile traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser.conftest import (
    APP,
    OpenPage,
    count_colors,
    evaluate,
    wait_until_drawn,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from invocation import run_cli
from playwright.sync_api import Browser
from profile_recordings import (
    collect,
    hostile_program,
    odd_times,
    overlapping,
    small_program,
    training,
)

from cudakit.profile.analysis import DeviceGaps, analyze
from cudakit.profile.idle import BlockingTime, Gaps, IdleCause
from cudakit.profile.report.page import explorer
from cudakit.profile.result import Step
from cudakit.profile.timeline import Activities, Timeline, first_time, timeline
from cudakit.report.document import Document, Note
from cudakit.report.html import render
from cudakit.trace.events import ApiCall, Event, KernelRun

TABS = ("flame", "kernels", "lines", "work")


def write_page(folder: Path, *activities: Activities, gaps: Sequence[DeviceGaps] = ()) -> Path:
    page = folder / "profile.html"
    nodes = (Note("ok", "The GPU was busy."), explorer(activities, gaps))
    page.write_text(render(Document("GPU profile", nodes)), encoding="utf-8")
    return page


@pytest.fixture(scope="session")
def program() -> Activities:
    return training(4000, seed=3)


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory, program: Activities) -> Path:
    return write_page(tmp_path_factory.mktemp("profile"), program)


def test_profile_page_draws_every_view_without_network_or_errors(
    open_page: OpenPage, page: Path
) -> None:
    opened = open_page(page)
    assert opened.page.get_attribute(".explorer", "data-ready") == "true"
    assert opened.messages == []
    for tab in TABS:
        opened.page.click(f"#tab-{tab}")
        wait_until_drawn(opened)
        if tab == "flame":
            assert count_colors(opened, ".view canvas") > 4
        else:
            assert opened.page.locator(".view .list .list-row").count() > 0, tab
            assert opened.page.locator(".view .list-head > *").last.inner_text() == "name", tab
    assert opened.messages == []
    assert opened.requests == [page.as_uri()]
    assert count_colors(opened, ".panes canvas") > 8


# --- sums ------------------------------------------------------------------------------------------


def python_sums(process: Timeline, first: int, last: int) -> dict[str, Any]:
    """Return the sums of a window, computed from the columns of a Timeline."""
    work = process.work
    base = first_time([process])
    start, end = work.start_ns - base, work.end_ns - base
    is_in = (start < last) & ((end > first) | (start >= first))
    time = np.minimum(end, last) - np.maximum(start, first)
    by_name: dict[str, list[int]] = {}
    for name, amount in zip(work.name[is_in].tolist(), time[is_in].tolist(), strict=True):
        sums = by_name.setdefault(process.names[name], [0, 0])
        sums[0] += amount
        sums[1] += 1
    busy = {}
    for device in np.unique(work.device).tolist():
        rows = is_in & (work.device == device)
        busy[str(device)] = covered(np.maximum(start[rows], first), np.minimum(end[rows], last))
    return {
        "time": int(time[is_in].sum()),
        "count": int(is_in.sum()),
        "busy": busy,
        "by_name": by_name,
    }


def covered(starts: np.ndarray, ends: np.ndarray) -> int:
    """Return the length of the union of intervals, by brute force over sorted intervals."""
    total, until = 0, -(2**62)
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


PAGE_SUMS = f"""windows => windows.map(([first, last]) => {{
  const {{ model }} = {APP};
  const totals = model.totalsIn(first, last);
  const groups = model.groupsIn(first, last, model.grouping("kernel"), null);
  return {{
    time: totals.time,
    count: totals.count,
    busy: Object.fromEntries(Object.entries(totals.busy).filter(([, ns]) => ns >= 0)),
    by_name: Object.fromEntries(groups.map(({{ name, time, count }}) => [name, [time, count]])),
  }};
}})"""


def test_sums_of_random_windows_equal_those_of_python(
    open_page: OpenPage, page: Path, program: Activities
) -> None:
    process = timeline(program)
    duration = (process.last_ns() or 0) - (process.first_ns() or 0)
    rng = random.Random(5)
    windows = [(0, duration), (duration - 1, duration), (0, 1)]
    windows += [tuple(sorted(rng.sample(range(duration), 2))) for _ in range(120)]
    windows += [
        (start, start + rng.randrange(1, 3000)) for start in rng.sample(range(duration), 60)
    ]
    opened = open_page(page)
    sums_of_page = evaluate(opened, PAGE_SUMS, [list(window) for window in windows])
    for window, sums in zip(windows, sums_of_page, strict=True):
        assert sums == python_sums(process, *window), window


def test_flame_graph_totals_and_lines_equal_the_gpu_time(open_page: OpenPage, page: Path) -> None:
    opened = open_page(page)
    differences = evaluate(
        opened,
        f"""() => {{
          const {{ model }} = {APP};
          const differences = [];
          for (const [first, last] of [[0, model.duration], [1e6, 3e6], [5e6, 5e6 + 777]]) {{
            const total = model.totalsIn(first, last).time;
            const flame = model.tree.totals(model.nodeTimes(first, last, null))[0];
            const groups = model.groupsIn(first, last, model.grouping("line"), null);
            const lines = groups.reduce((sum, group) => sum + group.time, 0);
            if (flame !== total || lines !== total) differences.push([first, last, total, flame, lines]);
          }}
          return differences;
        }}""",
    )
    assert differences == []


def test_coverage_of_a_row_adds_up_to_its_work_at_every_zoom(
    open_page: OpenPage, page: Path
) -> None:
    opened = open_page(page)
    worst = evaluate(
        opened,
        f"""async () => {{
          const app = {APP};
          let worst = 0;
          for (const [first, length] of [[0, app.model.duration], [1e6, 1e5], [2e6, 4000]]) {{
            app.show(first, length);
            app.redraw();
            const [from, to] = app.state.get("view");
            for (const row of app.model.rows.filter(({{ source }}) => source === "work")) {{
              const within = (i) => Math.min(row.end[i], to) - Math.max(row.start[i], from);
              let expected = 0;
              for (let i = 0; i < row.count; i++) expected += Math.max(0, within(i));
              const shares = app.timeline.coverage(row, 700);
              if (shares.some((share) => share < 0 || share > 1 + 1e-9)) worst = Infinity;
              const total = (shares.reduce((a, b) => a + b, 0) * (to - from)) / 700;
              worst = Math.max(worst, Math.abs(total - expected));
            }}
          }}
          return worst;
        }}""",
    )
    assert worst < 1  # nanoseconds


def test_painted_area_of_a_row_is_the_time_of_its_work(open_page: OpenPage, page: Path) -> None:
    opened = open_page(page)
    rows = evaluate(
        opened,
        f"""() => {{
          const app = {APP};
          const canvas = document.querySelector(".panes canvas");
          const rows = [];
          for (const [first, length] of [[0, app.model.duration], [1e6, 4e6], [1e6, 1e5]]) {{
            app.show(first, length);
            app.redraw();
            for (const {{ row, top, height }} of app.timeline.places) {{
              if (row?.source !== "work") continue;
              const left = app.timeline.axis.left;
              const width = canvas.width - left - app.timeline.axis.right;
              const {{ data }} = canvas.getContext("2d").getImageData(left, top, width, height);
              const pixels = new Uint32Array(data.buffer);
              let painted = 0;
              // The page is light: the background and the lines of the axis are brighter than all work.
              for (const pixel of pixels) if (Math.min(pixel & 255, (pixel >> 8) & 255) < 200) painted++;
              const shares = app.timeline.coverage(row, width);
              const covered = shares.reduce((sum, share) => sum + share, 0) / width;
              rows.push([painted / pixels.length, covered]);
            }}
          }}
          return rows;
        }}""",
    )
    assert len(rows) == 9
    for painted, covered in rows:
        assert painted == pytest.approx(covered, abs=0.12)


def test_idle_time_of_a_window_is_divided_by_cause(open_page: OpenPage, tmp_path: Path) -> None:
    kernels = [(0, 100), (300, 400), (1000, 1100)]
    activities = collect([Event(KernelRun(7, "k", 1, *times)) for times in kernels])
    causes = np.zeros((2, len(IdleCause)), np.int64)
    causes[:, [IdleCause.LAUNCH, IdleCause.HOST_WAIT]] = [[150, 50], [100, 500]]
    no_calls = BlockingTime(*np.zeros((4, 0), np.int64))
    starts, ends = np.array([100, 400]), np.array([300, 1000])
    gaps = Gaps(starts, ends, causes, np.array([1, 2]), no_calls)
    opened = open_page(
        write_page(tmp_path, activities, gaps=[DeviceGaps(activities.process, 0, gaps)])
    )
    assert opened.messages == []
    sums = evaluate(
        opened,
        f"() => [[0, 1100], [100, 300], [200, 700]].map(window => {APP}.model.idleIn(...window))",
    )
    assert [row[:2] for row in sums] == [[250, 550], [150, 50], [125, 275]]
    assert "host waits" in opened.page.locator(".details").inner_text()


def test_click_on_a_step_selects_it_as_the_window(open_page: OpenPage, tmp_path: Path) -> None:
    activities = collect([Event(KernelRun(7, "k", 1, 100 * i, 100 * i + 50)) for i in range(10)])
    (device,) = analyze([activities]).result.devices
    steps = tuple(
        Step(number, number == 1, False, replace(device.measured, start_ns=start, end_ns=end))
        for number, start, end in ((1, 0, 400), (2, 400, 900))
    )
    device = replace(device, steps=replace(device.steps, warm_up=1, steps=steps))
    nodes = (explorer([activities], devices=[device]),)
    path = tmp_path / "page.html"
    path.write_text(render(Document("GPU profile", nodes)), encoding="utf-8")
    opened = open_page(path)
    assert evaluate(opened, f"() => {APP}.model.rows[0].label") == "steps"
    # The page opens on the measured steps.
    assert evaluate(opened, f"() => {APP}.state.get('view')") == [400, 900]
    x = evaluate(opened, f"() => {APP}.timeline.axis.xOf(600, {APP}.timeline.surface.width)")
    top = evaluate(opened, f"() => {APP}.timeline.places.find(({{ row }}) => row).top")
    box = opened.page.locator(".panes canvas").first.bounding_box()
    assert box is not None
    opened.page.mouse.click(box["x"] + x, box["y"] + top + 5)
    wait_until_drawn(opened)
    assert evaluate(opened, f"() => {APP}.state.get('window')") == [400, 900]
    assert opened.messages == []


# --- gestures and state ----------------------------------------------------------------------------


def test_dragging_selects_a_window_that_the_hash_keeps(open_page: OpenPage, page: Path) -> None:
    opened = open_page(page)
    box = opened.page.locator(".panes canvas").first.bounding_box()
    assert box is not None
    y = box["y"] + 12
    opened.page.mouse.move(box["x"] + 250, y)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 420, y, steps=5)
    opened.page.mouse.up()
    wait_until_drawn(opened)
    window = evaluate(opened, f"() => {APP}.state.get('window')")
    hash_text = evaluate(opened, "() => location.hash")
    assert window[0] < window[1]
    assert f"window={window[0]}-{window[1]}" in hash_text
    assert "Selected window" in opened.page.locator(".details").inner_text()
    reopened = open_page(page, hash_text=hash_text)
    assert evaluate(reopened, f"() => {APP}.state.get('window')") == window


def test_wheel_zooms_around_the_pointer_and_keys_move_the_view(
    open_page: OpenPage, page: Path
) -> None:
    opened = open_page(page)
    canvas = opened.page.locator(".panes canvas").first
    canvas.hover(position={"x": 400, "y": 60})
    opened.page.mouse.wheel(0, -600)
    wait_until_drawn(opened)
    duration = evaluate(opened, f"() => {APP}.model.duration")
    first, last = evaluate(opened, f"() => {APP}.state.get('view')")
    assert last - first < 0.6 * duration
    canvas.focus()
    opened.page.keyboard.press("ArrowRight")
    wait_until_drawn(opened)
    moved_first, moved_last = evaluate(opened, f"() => {APP}.state.get('view')")
    assert moved_first > first
    assert moved_last - moved_first == last - first
    opened.page.keyboard.press("0")
    wait_until_drawn(opened)
    assert evaluate(opened, f"() => {APP}.state.get('view')") == [0, duration]


def test_clicking_a_kernel_shows_its_launch_configuration_and_its_call(
    open_page: OpenPage, tmp_path: Path
) -> None:
    opened = open_page(write_page(tmp_path, small_program()), hash_text="#pick=work0")
    details = opened.page.locator(".details")
    for text in ("gemm", "8 × 2 × 1", "128 × 1 × 1 (128 threads)", "40 per thread", "4.00 KiB"):
        assert text in details.inner_text()
    assert "cudaLaunchKernel" in details.inner_text()
    assert "user/train.py:41 step" in details.inner_text()
    point = evaluate(
        opened,
        f"""() => {{
          const {{ timeline, model }} = {APP};
          const place = timeline.places.find(({{ row }}) => row?.source === "call");
          const middle = (model.calls.start[1] + model.calls.end[1]) / 2;
          return [timeline.axis.xOf(middle, timeline.surface.width), place.top + 5];
        }}""",
    )
    box = opened.page.locator(".panes canvas").first.bounding_box()
    assert box is not None
    opened.page.mouse.click(box["x"] + point[0], box["y"] + point[1])
    wait_until_drawn(opened)
    assert "cudaMemcpyAsync" in details.inner_text()
    assert "Memcpy HtoD (Pageable -> Device)" in details.inner_text()


def test_filter_keeps_only_kernels_and_stacks_with_the_text(
    open_page: OpenPage, page: Path
) -> None:
    opened = open_page(page)
    opened.page.click("#tab-kernels")
    wait_until_drawn(opened)
    all_rows = evaluate(opened, f"() => {APP}.views.kernels.rows.length")
    opened.page.fill("input[type=search]", "xmma_gemm")
    wait_until_drawn(opened)
    names = evaluate(opened, f"() => {APP}.views.kernels.rows.map(row => row.name)")
    assert 0 < len(names) < all_rows
    assert all("xmma_gemm" in name for name in names)
    opened.page.fill("input[type=search]", "no such kernel")
    wait_until_drawn(opened)
    assert evaluate(opened, f"() => {APP}.views.kernels.rows.length") == 0


def test_work_list_has_the_work_of_the_window(
    open_page: OpenPage, page: Path, program: Activities
) -> None:
    opened = open_page(page, hash_text="#tab=work&window=1000000-1400000")
    count = evaluate(opened, f"() => {APP}.views.work.list.length")
    assert count == python_sums(timeline(program), 1_000_000, 1_400_000)["count"]


@pytest.mark.parametrize(
    "hash_text",
    ["#view=5-2", "#view=x", "#window=-5--9", "#pick=work999999999", "#pick=call-1", "#pick=idle0",
     "#tab=<script>", "#%E0%A4%A", "#group=-7"],
)  # fmt: skip
def test_damaged_hash_is_ignored(open_page: OpenPage, page: Path, hash_text: str) -> None:
    opened = open_page(page, hash_text=hash_text)
    assert opened.page.get_attribute(".explorer", "data-ready") == "true"
    assert opened.messages == []


@pytest.mark.parametrize("width", [800, 1440, 2560])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_profile_page_fits_the_width_of_the_window(
    open_page: OpenPage, page: Path, width: int, scheme: str
) -> None:
    opened = open_page(page, size=(width, 900), scheme=scheme)
    assert evaluate(opened, "() => document.documentElement.scrollWidth <= innerWidth")
    assert count_colors(opened, ".panes canvas") > 8


def test_devices_of_ranks_have_the_names_of_the_report(open_page: OpenPage, tmp_path: Path) -> None:
    log = Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog"
    page = tmp_path / "ddp.html"
    assert run_cli("profile", log, "-q", "-f", "-o", page).exit_code == 0
    panel = open_page(page).page.locator(".details").inner_text()
    assert "rank 0, GPU 0 busy" in panel
    assert "rank 1, GPU 1 busy" in panel


def test_panel_says_that_the_whole_recording_is_longer_than_the_measured_steps(
    open_page: OpenPage, tmp_path: Path
) -> None:
    log = Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog"
    page = tmp_path / "ddp.html"
    assert run_cli("profile", log, "-q", "-f", "-o", page).exit_code == 0
    opened = open_page(page)
    panel = opened.page.locator(".details")
    assert "includes time before and after the measured steps" in panel.inner_text()
    evaluate(opened, f"() => {APP}.state.set({{ window: [4.60e9, 4.65e9] }})")
    wait_until_drawn(opened)
    assert "measured steps" not in panel.inner_text()


def test_page_of_two_processes_sums_both(open_page: OpenPage, tmp_path: Path) -> None:
    processes = (training(300, seed=1, process=10), training(200, seed=2, process=11))
    opened = open_page(write_page(tmp_path, *processes))
    total = evaluate(opened, f"() => {APP}.model.totalsIn(0, {APP}.model.duration + 1).time")
    work = [timeline(process).work for process in processes]
    assert total == sum(int((table.end_ns - table.start_ns).sum()) for table in work)
    calls = evaluate(
        opened, f"() => Array.from({APP}.model.work.call, call => {APP}.model.calls.start[call])"
    )
    starts = sorted(
        (int(start), int(timeline(process).calls.start_ns[call]))
        for process in processes
        for start, call in zip(
            timeline(process).work.start_ns, timeline(process).work.call, strict=True
        )
    )
    base = first_time([timeline(process) for process in processes])
    assert sorted(calls) == sorted(call - base for _, call in starts)


# --- hostile traces --------------------------------------------------------------------------------


def test_hostile_names_are_shown_as_text_and_run_nothing(
    open_page: OpenPage, tmp_path: Path
) -> None:
    opened = open_page(write_page(tmp_path, hostile_program()))
    for tab in TABS:
        opened.page.click(f"#tab-{tab}")
        wait_until_drawn(opened)
    assert opened.messages == []
    assert opened.page.title() == "GPU profile"
    assert opened.page.locator(".explorer img").count() == 0
    opened.page.click("#tab-kernels")
    assert "</script>" in opened.page.locator(".view .list").inner_text()


@pytest.mark.parametrize(
    "activities",
    [
        collect([]),
        collect([Event(KernelRun(0, "", 0, 5, 5))]),
        collect([Event(ApiCall("cudaMalloc", 1, 5, 9), thread=1)]),
        odd_times(),
        overlapping(),
        collect([Event(KernelRun(i, "k", 0, 5, 5 + i), device=i % 40) for i in range(2000)]),
    ],
    ids=["empty", "no duration", "only a call", "odd times", "overlapping", "2000 streams"],
)
def test_small_and_odd_profiles_give_a_page_without_errors(
    open_page: OpenPage, tmp_path: Path, activities: Activities
) -> None:
    opened = open_page(write_page(tmp_path, activities))
    assert opened.messages == []
    for tab in TABS if len(activities.strings) > 1 else ():
        opened.page.click(f"#tab-{tab}")
        wait_until_drawn(opened)
    assert opened.messages == []


KERNELS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 3000), st.integers(0, 500)),
    min_size=1,
    max_size=40,
)


@settings(
    max_examples=10,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(kernels=KERNELS, window=st.tuples(st.integers(0, 2000), st.integers(1, 2000)))
def test_sums_of_any_kernels_equal_those_of_python(
    browser: Browser,
    tmp_path_factory: pytest.TempPathFactory,
    kernels: list[tuple[int, str, int, int]],
    window: tuple[int, int],
) -> None:
    activities = collect(
        Event(KernelRun(stream, name, 0, start, start + duration), device=stream % 2)
        for stream, name, start, duration in kernels
    )
    opener = OpenPage(browser)
    try:
        opened = opener(write_page(tmp_path_factory.mktemp("page"), activities))
        assert opened.messages == []
        first, last = window[0], window[0] + window[1]
        [sums] = evaluate(opened, PAGE_SUMS, [[first, last]])
        assert sums == python_sums(timeline(activities), first, last)
    finally:
        opener.close()
