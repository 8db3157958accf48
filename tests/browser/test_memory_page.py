"""Tests of the memory page in Chromium: its drawings, its computed values, and hostile files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from browser.conftest import (
    APP,
    OpenPage,
    count_colors,
    evaluate,
    wait_until_drawn,
)
from hypothesis import HealthCheck, Phase, given, settings
from invocation import run_cli
from memory import builders, strategies
from memory.simulated_history import SimulatedHistory
from playwright.sync_api import Browser

from cudakit.memory.analyze import analyze, diff
from cudakit.memory.history import History, reconstruct
from cudakit.memory.load import load
from cudakit.memory.report import report
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import DeviceTrace, Snapshot
from cudakit.report.html import render
from cudakit.stacks import Frame

DATA = Path(__file__).parents[1] / "data"
EXAMPLES = Path(__file__).parents[2] / "examples" / "memory"
RECORDED = ("train", "leak", "streams", "pools", "expandable", "fragmented_oom")
TABS = ("map", "layout", "flame", "holders", "events")


def write_page(snapshot: Path, folder: Path) -> Path:
    page = folder / f"{snapshot.name}.html"
    run = run_cli("memviz", snapshot, "-q", "-f", "-o", page)
    assert run.exit_code == 0, run.stderr
    return page


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_page(DATA / f"{name}.pkl.gz", folder) for name in RECORDED}


@pytest.mark.parametrize("name", RECORDED)
def test_memory_page_draws_every_view_without_network_or_errors(
    open_page: OpenPage, pages: dict[str, Path], name: str
) -> None:
    opened = open_page(pages[name])
    assert opened.page.get_attribute(".explorer", "data-ready") == "true"
    assert count_colors(opened, ".panes canvas") > 4
    for tab in TABS:
        opened.page.click(f"#tab-{tab}")
        wait_until_drawn(opened)
        if tab in ("map", "layout", "flame"):
            assert count_colors(opened, ".view canvas") > 3, tab
        else:
            assert opened.page.locator(".view .list .list-row").count() > 0, tab
    assert opened.messages == []
    assert opened.requests == [pages[name].as_uri()]


def python_totals(replayed: History, event: int) -> dict[str, int]:
    curves, moment = replayed.curves, event + 1
    names = ("requested", "allocated", "active", "reserved")
    totals = {name: int(getattr(curves, name)[moment]) for name in names}
    begin, end = replayed.allocations.begin, replayed.allocations.end
    return totals | {"blocks": int(((begin < moment) & (moment <= end)).sum())}


def python_free(replayed: History, event: int) -> dict[str, float]:
    layout = replayed.layout_at(event + 1)
    free, largest = int(layout.free_block_size.sum()), int(layout.free_block_size.max(initial=0))
    reserved = max(int(layout.segments.size.sum()), 1)
    return {
        "free": free,
        "largest": largest,
        "share": free / reserved,
        "fragmentation": 1 - largest / free if free else 0,
    }


def python_bytes_by_stack(replayed: History, event: int) -> dict[str, int]:
    allocations, moment = replayed.allocations, event + 1
    live = (allocations.begin < moment) & (moment <= allocations.end)
    bytes_by_stack: dict[str, int] = {}
    for stack, size in zip(
        allocations.stack[live].tolist(), allocations.size[live].tolist(), strict=True
    ):
        bytes_by_stack[str(stack)] = bytes_by_stack.get(str(stack), 0) + size
    return bytes_by_stack


@pytest.mark.parametrize("name", RECORDED)
def test_memory_page_computes_the_state_at_random_events_as_python_does(
    open_page: OpenPage, pages: dict[str, Path], name: str
) -> None:
    snapshot = load(DATA / f"{name}.pkl.gz")
    replayed = reconstruct(snapshot, snapshot.devices[0])
    rng = random.Random(name)
    events = [
        -1,
        *(rng.randrange(-1, replayed.n_events) for _ in range(1000)),
        replayed.n_events - 1,
    ]
    opened = open_page(pages[name])
    page_states = evaluate(
        opened,
        f"""async events => {{
          const {{ model }} = {APP};
          const grouping = model.grouping("stack");
          await model.free.ready;
          return events.map(event => [
            model.totalsAt(event),
            model.free.at(event),
            Object.fromEntries(model.groupsAt(event, grouping, null).map(group => [group.id, group.bytes])),
          ]);
        }}""",
        events,
    )
    for event, (totals, free, by_stack) in zip(events, page_states, strict=True):
        assert totals == python_totals(replayed, event), event
        assert free == python_free(replayed, event), event
        assert by_stack == python_bytes_by_stack(replayed, event), event


@pytest.mark.parametrize("name", RECORDED)
def test_memory_page_computes_random_windows_as_python_does(
    open_page: OpenPage, pages: dict[str, Path], name: str
) -> None:
    snapshot = load(DATA / f"{name}.pkl.gz")
    replayed = reconstruct(snapshot, snapshot.devices[0])
    allocations, requested = replayed.allocations, replayed.curves.requested
    rng = random.Random(name)
    windows = [
        sorted((rng.randrange(-1, replayed.n_events), rng.randrange(-1, replayed.n_events)))
        for _ in range(200)
    ]
    opened = open_page(pages[name])
    page_windows = evaluate(
        opened,
        f"""windows => windows.map(([first, last]) => {{
          const {{ model }} = {APP};
          const sum = (bytes) => bytes.reduce((total, value) => total + value, 0);
          return [model.peakBetween(first, last), sum(model.stackBytesAllocated(first, last, null))];
        }})""",
        windows,
    )
    for (first, last), (peak, allocated) in zip(windows, page_windows, strict=True):
        assert peak == first + int(requested[first + 1 : last + 2].argmax())
        inside = (first <= allocations.begin) & (allocations.begin <= last)
        assert allocated == int(allocations.size[inside].sum())


def test_memory_page_bands_add_up_to_the_memory_in_use(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    differences = evaluate(
        opened,
        f"""() => {{
          const {{ model, bands }} = {APP};
          const differences = [];
          const {{ axis }} = {APP};
          for (const [first, last, columns] of [[-1, model.events, 500], [100, 300, 200], [0, 9, 9]]) {{
            const values = bands.sample(axis.columns(first, last, columns));
            const count = bands.names.length;
            for (let column = 0; column < columns; column++) {{
              const from = Math.floor(first + ((last - first) * column) / columns);
              const to = Math.max(from, Math.ceil(first + ((last - first) * (column + 1)) / columns) - 1);
              let highest = 0;
              const end = Math.min(to, model.events - 1);
              for (let e = from; e <= end; e++) highest = Math.max(highest, model.curves.active[e + 1]);
              let total = 0;
              for (let band = 0; band < count; band++) total += values[column * count + band];
              if (total !== highest) differences.push([first, column, total, highest]);
            }}
          }}
          return differences;
        }}""",
    )
    assert differences == []


def test_columns_of_the_time_axis_show_the_highest_memory_of_their_times(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"], hash_text="#axis=time")
    differences = evaluate(
        opened,
        f"""() => {{
          const {{ model, bands, axis }} = {APP};
          const differences = [];
          const times = model.arrays.time_us;
          const active = model.curves.active;
          const middle = (axis.first + axis.last) / 2;
          const ranges = [[axis.first, axis.last, 700], [middle, middle + 5000, 300]];
          for (const [first, last, columns] of ranges) {{
            const values = bands.sample(axis.columns(first, last, columns));
            const count = bands.names.length;
            for (let column = 0; column < columns; column++) {{
              const start = first + ((last - first) / columns) * column;
              const stop = first + ((last - first) / columns) * (column + 1);
              // The state at the start of the column, and the states after all events in it.
              let highest = active[times.findLastIndex((time) => time <= start) + 1];
              times.forEach((time, e) => {{
                if (start < time && time < stop) highest = Math.max(highest, active[e + 1]);
              }});
              let total = 0;
              for (let band = 0; band < count; band++) total += values[column * count + band];
              if (total !== highest) differences.push([first, column, total, highest]);
            }}
          }}
          return differences;
        }}""",
    )
    assert differences == []


def test_x_axis_of_time_keeps_the_visible_events_and_is_in_the_hash(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"], hash_text="#view=500-900")
    opened.page.get_by_label("x axis").select_option("time")
    wait_until_drawn(opened)
    visible_events = f"() => {APP}.visibleRange().map(position => {APP}.axis.eventAt(position))"
    assert evaluate(opened, visible_events) == [500, 900]
    hash_text = evaluate(opened, "() => location.hash")
    assert "axis=time" in hash_text
    reopened = open_page(pages["train"], hash_text=hash_text)
    assert evaluate(reopened, visible_events) == [500, 900]
    assert count_colors(reopened, ".panes canvas") > 4
    reopened.page.get_by_role("button", name="show all events").click()
    wait_until_drawn(reopened)
    last = evaluate(reopened, f"() => {APP}.model.events - 1")
    assert evaluate(reopened, visible_events) == [-1, last]
    assert reopened.messages == []


def test_dragging_selects_a_window_that_the_hash_keeps(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    box = opened.page.locator(".panes canvas").first.bounding_box()
    assert box is not None
    y = box["y"] + 100
    opened.page.mouse.move(box["x"] + 200, y)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 400, y, steps=5)
    opened.page.mouse.up()
    wait_until_drawn(opened)
    brush = evaluate(opened, f"() => {APP}.state.get('brush')")
    hash_text = evaluate(opened, "() => location.hash")
    assert brush[0] < brush[1]
    assert f"brush={brush[0]}-{brush[1]}" in hash_text
    reopened = open_page(pages["train"], hash_text=hash_text)
    assert evaluate(reopened, f"() => {APP}.state.get('brush')") == brush


def test_wheel_zooms_around_the_pointer_and_keys_move_the_cursor(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    canvas = opened.page.locator(".panes canvas").first
    canvas.hover(position={"x": 300, "y": 100})
    opened.page.mouse.wheel(0, -400)
    wait_until_drawn(opened)
    first, last = evaluate(opened, f"() => {APP}.visibleRange()")
    events = evaluate(opened, f"() => {APP}.model.events")
    assert last - first < 0.7 * events
    canvas.focus()
    cursor_before = evaluate(opened, f"() => {APP}.state.get('cursor')")
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("0")
    wait_until_drawn(opened)
    assert evaluate(opened, f"() => {APP}.state.get('cursor')") == cursor_before - 1
    assert evaluate(opened, f"() => {APP}.visibleRange()") == [-1, events]


def test_filter_keeps_only_stacks_with_the_text(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    opened.page.click("#tab-holders")
    wait_until_drawn(opened)
    all_groups = evaluate(opened, f"() => {APP}.views.holders.rows.length")
    opened.page.fill("input[type=search]", "no such function")
    wait_until_drawn(opened)
    assert evaluate(opened, f"() => {APP}.views.holders.rows.length") == 0
    opened.page.fill("input[type=search]", "optim")
    wait_until_drawn(opened)
    assert 0 < evaluate(opened, f"() => {APP}.views.holders.rows.length") < all_groups


def test_clicking_an_event_shows_its_allocation_with_the_call_stack(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    opened.page.click("#tab-events")
    wait_until_drawn(opened)
    headings = opened.page.locator(".view .list-head span").all_inner_texts()
    assert headings == ["event", "time", "action", "requested", "call site"]
    opened.page.locator(".view .list .list-row", has_text="alloc").first.click()
    wait_until_drawn(opened)
    details = opened.page.locator(".details").inner_text()
    assert "Selected allocation" in details
    assert "record_snapshots.py" in details


def test_filter_that_matches_nothing_says_that_no_memory_matches(
    open_page: OpenPage, pages: dict[str, Path]
) -> None:
    opened = open_page(pages["train"])
    opened.page.click("#tab-holders")
    wait_until_drawn(opened)
    empty_text = opened.page.get_by_text("No memory in use at the cursor matches the filter.")
    assert not empty_text.is_visible()
    opened.page.fill("input[type=search]", "no_such_function")
    wait_until_drawn(opened)
    assert empty_text.is_visible()
    opened.page.click("#tab-events")
    wait_until_drawn(opened)
    title = opened.page.locator(".view-bar").inner_text()
    assert title.endswith("match the filter, the selected group and the selected window")


@pytest.mark.parametrize("clipboard", ["allowed", "missing"])
def test_recommended_settings_can_be_copied(
    open_page: OpenPage, tmp_path: Path, clipboard: str
) -> None:
    page = write_page(EXAMPLES / "varying_lengths.pkl.gz", tmp_path)
    script = "delete Navigator.prototype.clipboard" if clipboard == "missing" else ""
    opened = open_page(page, init_script=script)
    settings = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert opened.page.locator(".settings code").inner_text() == settings
    opened.page.click(".settings button")
    wait_until_drawn(opened)
    assert evaluate(opened, "() => getSelection().toString()") == settings
    if clipboard == "allowed":
        assert opened.page.locator(".settings button").inner_text() == "copied"
        assert evaluate(opened, "() => navigator.clipboard.readText()") == settings
    else:
        assert "Ctrl+C" in opened.page.locator(".settings button").inner_text()
    assert opened.messages == []


@pytest.mark.parametrize(
    "hash_text",
    [
        "#cursor=999999999",
        "#view=5-2",
        "#view=x",
        "#tab=<script>",
        "#brush=-5--9",
        "#%E0%A4%A",
        "#group=-7",
    ],
)
def test_damaged_hash_is_ignored(
    open_page: OpenPage, pages: dict[str, Path], hash_text: str
) -> None:
    opened = open_page(pages["leak"], hash_text=hash_text)
    assert opened.page.get_attribute(".explorer", "data-ready") == "true"
    assert opened.messages == []


@pytest.mark.parametrize("width", [700, 1300, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_memory_page_fits_the_width_of_the_window(
    open_page: OpenPage, pages: dict[str, Path], width: int, scheme: str
) -> None:
    opened = open_page(pages["fragmented_oom"], size=(width, 900), scheme=scheme)
    assert evaluate(opened, "() => document.documentElement.scrollWidth <= innerWidth")
    assert count_colors(opened, ".panes canvas") > 4


def test_page_of_several_files_fits_a_narrow_window_and_has_a_valid_policy(
    open_page: OpenPage, tmp_path: Path
) -> None:
    page = tmp_path / "several.html"
    # The page has three scripts: a device ran out of memory, and a setting can be copied.
    snapshots = [EXAMPLES / f"{name}.pkl.gz" for name in ("retained_graph", "varying_lengths")]
    run = run_cli("memviz", *snapshots, "-q", "-f", "-o", page)
    assert run.exit_code == 0
    opened = open_page(page, size=(700, 900))
    opened.page.wait_for_selector(".explorer[data-ready] >> nth=2", state="attached")
    assert evaluate(opened, "() => document.documentElement.scrollWidth <= innerWidth")
    assert opened.messages == []


def test_page_of_two_devices_keeps_their_states_apart(open_page: OpenPage, tmp_path: Path) -> None:
    page = tmp_path / "two.html"
    run = run_cli("memviz", DATA / "train.pkl.gz", DATA / "leak.pkl.gz", "-q", "-f", "-o", page)
    assert run.exit_code == 0
    opened = open_page(page, hash_text="#cursor=5&2.cursor=7")
    opened.page.wait_for_selector(".explorer[data-ready] >> nth=2", state="attached")
    cursors = (
        "() => [...document.querySelectorAll('[data-kind=memory]')]"
        ".map(e => e.explorer.state.get('cursor'))"
    )
    assert evaluate(opened, cursors) == [5, 7]


def test_click_in_the_view_of_all_devices_sets_every_cursor_to_one_time(
    open_page: OpenPage, tmp_path: Path
) -> None:
    page = tmp_path / "ranks.html"
    snapshot = DATA / "train.pkl.gz"
    run = run_cli("memviz", snapshot, snapshot, snapshot, "-q", "-f", "-o", page)
    assert run.exit_code == 0
    opened = open_page(page)
    opened.page.wait_for_selector(".explorer[data-ready] >> nth=3", state="attached")
    assert count_colors(opened, "[data-kind=memory_devices] canvas") > 4
    canvas = opened.page.locator("[data-kind=memory_devices] canvas")
    canvas.click(position={"x": 600, "y": 100})
    wait_until_drawn(opened)
    cursors = evaluate(
        opened,
        "() => [...document.querySelectorAll('[data-kind=memory]')]"
        ".map(e => e.explorer.state.get('cursor'))",
    )
    assert len(set(cursors)) == 1
    loaded = load(snapshot)
    assert cursors[0] != reconstruct(loaded, loaded.devices[0]).peak_moment() - 1
    assert "#cursor=" in evaluate(opened, "() => location.hash")
    opened.page.locator("[data-kind=memory_devices] select").select_option("event")
    canvas.click(position={"x": 700, "y": 20})
    wait_until_drawn(opened)
    assert "devices.axis=event" in evaluate(opened, "() => location.hash")
    assert opened.messages == []
    assert opened.requests == [page.as_uri()]


def test_page_of_a_comparison_draws_what_grew_and_what_shrank(
    open_page: OpenPage, tmp_path: Path
) -> None:
    page = tmp_path / "diff.html"
    before, after = DATA / "train_python.pkl.gz", DATA / "oom.pkl.gz"
    run = run_cli("memviz", after, "--diff", before, "-q", "-f", "-o", page)
    assert run.exit_code == 0
    (compared,) = diff(load(before), load(after), MemorySpec()).devices
    opened = open_page(page)
    for moment, result in (("peak", compared.peak), ("end", compared.end)):
        opened.page.locator(".explorer select").select_option(moment)
        wait_until_drawn(opened)
        totals = evaluate(
            opened,
            "() => Object.values(document.querySelector('.explorer').explorer.graphs)"
            ".map(graph => graph.total[0])",
        )
        grown = sum(row.change_bytes for row in (*result.grown, *result.appeared))
        shrunk = sum(-row.change_bytes for row in (*result.shrunk, *result.vanished))
        assert totals == [grown, shrunk]
    assert count_colors(opened, ".explorer canvas") > 3
    assert evaluate(opened, "() => location.hash") == "#moment=end"
    assert opened.messages == []


def test_view_of_all_devices_accepts_a_device_without_events(
    open_page: OpenPage, tmp_path: Path
) -> None:
    empty = builders.snapshot(builders.trace((), [builders.Segment(1 << 21, 1 << 21)]))
    page = tmp_path / "page.html"
    result = analyze([empty, load(str(DATA / "train.pkl.gz"))], MemorySpec())
    page.write_text(render(report(result)), encoding="utf-8")
    opened = open_page(page)
    opened.page.wait_for_selector(".explorer[data-ready] >> nth=2", state="attached")
    opened.page.locator("[data-kind=memory_devices] canvas").click(position={"x": 600, "y": 20})
    wait_until_drawn(opened)
    assert "#2.cursor=" in evaluate(opened, "() => location.hash")
    assert opened.messages == []


HOSTILE = (
    "</script><script>document.title='run'</script>",
    '"><img src=x onerror="document.title=\'run\'">',
    "\u202egnp.exe\u202c",
    "\x00\x1b[31m",
    "x" * 100_000,
    "<!--",
)


def write_snapshot_page(snapshot: Snapshot, folder: Path) -> Path:
    """Write the page of a snapshot, and return its path."""
    page = folder / "page.html"
    page.write_text(render(report(analyze([snapshot], MemorySpec()))), encoding="utf-8")
    return page


def test_hostile_names_are_shown_as_text_and_run_nothing(
    open_page: OpenPage, tmp_path: Path
) -> None:
    frames = tuple(Frame(text, text, 1) for text in HOSTILE)
    stacks = ((), *((i,) for i in range(len(frames))))
    entries = [builders.alloc(0x1000 * (i + 1), 512, stack=i + 1) for i in range(len(frames))]
    opened = open_page(
        write_snapshot_page(
            builders.snapshot(builders.trace(entries), frames=frames, stacks=stacks), tmp_path
        )
    )
    for tab in TABS:
        opened.page.click(f"#tab-{tab}")
        wait_until_drawn(opened)
    assert opened.page.title().startswith("GPU memory of")
    assert opened.messages == []
    assert opened.page.locator(".explorer img").count() == 0
    opened.page.click("#tab-holders")
    assert "</script>" in opened.page.locator(".view .list").inner_text()


@pytest.mark.parametrize(
    "trace",
    [
        builders.trace(),
        builders.trace([builders.alloc(0x1000, 512)]),
        builders.trace([builders.oom(1 << 40, device_free=5)]),
        builders.trace((), [builders.Segment(0x1000, 1 << 21)]),
        builders.trace((), [builders.Segment(i << 21, 1 << 21) for i in range(1, 20_000)]),
    ],
    ids=["empty", "one event", "only a failure", "only a segment", "20,000 segments"],
)
def test_small_and_odd_traces_give_a_page_without_errors(
    open_page: OpenPage, tmp_path: Path, trace: DeviceTrace
) -> None:
    opened = open_page(write_snapshot_page(builders.snapshot(trace), tmp_path))
    assert opened.messages == []
    if not len(trace.events):
        assert "the trace has no events" in opened.page.locator(".explorer-views").inner_text()


# The page holds addresses as float64. Files with addresses of more than 57 bits are refused, and addresses of
# blocks are multiples of 512, so that real ones are exact; arbitrary ones are only up to 53 bits.
@settings(
    max_examples=12,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(history=strategies.histories() | strategies.garbage(max_address=1 << 52))
def test_memory_page_agrees_with_python_at_every_event_of_any_trace(
    browser: Browser,
    tmp_path_factory: pytest.TempPathFactory,
    history: SimulatedHistory | DeviceTrace,
) -> None:
    snapshot = (
        history.snapshot() if isinstance(history, SimulatedHistory) else builders.snapshot(history)
    )
    replayed = reconstruct(snapshot, snapshot.devices[0])
    opener = OpenPage(browser)
    try:
        opened = opener(write_snapshot_page(snapshot, tmp_path_factory.mktemp("page")))
        assert opened.messages == []
        if not replayed.n_events:
            return
        events = list(range(-1, replayed.n_events))
        page_totals = evaluate(
            opened, f"events => events.map(e => {APP}.model.totalsAt(e))", events
        )
        assert page_totals == [python_totals(replayed, event) for event in events]
        page_free = evaluate(
            opened,
            f"events => {APP}.model.free.ready.then(() => events.map(e => {APP}.model.free.at(e)))",
            events,
        )
        if not replayed.inconsistencies.total:
            assert page_free == [python_free(replayed, event) for event in events]
    finally:
        opener.close()
