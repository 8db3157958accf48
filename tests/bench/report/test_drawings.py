"""The drawings of a bench: sweeps, roofline, relative rates and distributions of samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from markup_tree import Node, read

from cudakit.bench.report.curves import draw_roofline, draw_sweep
from cudakit.bench.report.lanes import draw_relative_rates, draw_samples
from cudakit.report.document import Columns, Document, Note, View
from cudakit.report.html import render
from cudakit.report.picture import Picture

NAN = float("nan")
SIZES = (2.0**10, 2.0**15, 2.0**20)


DRAWINGS: dict[str, Callable[[Sequence[Columns]], Picture]] = {
    "sweep": draw_sweep,
    "roofline": draw_roofline,
    "vs": draw_relative_rates,
    "samples": draw_samples,
}


def render_page(*columns: Columns) -> Node:
    """Render a page with one drawing of Columns; the name of the first Columns selects the function."""
    draw = DRAWINGS[columns[0].name.split(" ")[0]]
    view = View("drawing", tuple(item.name for item in columns), draw, Note("info", "no"))
    return read(render(Document("bench", (*columns, view)))).one("main")


def render_figure(*columns: Columns) -> Node:
    return render_page(*columns).one("figure")


def points(path: Node) -> list[tuple[int, int]]:
    matches = re.findall(r"[ML](\d+) (\d+)", str(path.attributes["d"]))
    return [(int(x), int(y)) for x, y in matches]


def ticks(picture: Node) -> list[str]:
    return [node.words for node in picture.all("text", "tick")]


# --- sweeps


def sweep_columns(
    *,
    rates: tuple[float, ...] = (1e9, 2e9, 4e9),
    limits: tuple[float, ...] = (5e9, 5e9, 5e9),
    name: str = "size_bytes",
    lines: int = 1,
    library: int = 0,
    fit: float = NAN,
) -> Columns:
    amounts = np.tile(SIZES, lines)
    times = amounts / np.tile(rates, lines)
    line = np.repeat(np.arange(lines), 3)
    return Columns(
        f"sweep {name}",
        {
            "line": line,
            "colour": np.where(library, 0, line),
            "library": line * library,
            name.partition(": ")[0]: amounts.copy(),
            "median_s": times,
            "ci95_low_s": times * 0.8,
            "ci95_high_s": times * 1.25,
            "limit_s": amounts / np.tile(limits, lines),
            "fit_s": times * fit,
            "amount": amounts,
            "unit": np.zeros(3 * lines, np.int64),
        },
        {"line": ("read", "write")[:lines], "unit": ("B",)},
    )


def timed(**options: float) -> Columns:
    columns = sweep_columns(rates=(1e9, 1e9, 1e9), **options)
    columns.arrays["amount"][:] = NAN
    return columns


def curves(picture: Node) -> list[Node]:
    return [
        path
        for path in picture.one("svg", "plot").all("path", "line")
        if "limit" not in str(path.attributes["class"]) and "L" in str(path.attributes["d"])
    ]


def test_wide_axis_is_logarithmic_with_ticks_at_data() -> None:
    picture = render_figure(sweep_columns())

    (curve,) = curves(picture)
    assert [x for x, _ in points(curve)] == [0, 1200, 2400]
    assert {"1 KiB", "32 KiB", "1 MiB"} <= set(ticks(picture))
    assert "2 KiB" not in ticks(picture)


def test_narrow_axis_is_linear() -> None:
    columns = sweep_columns(name="nodes")
    columns.arrays["nodes"][:] = (10, 20, 40)

    (curve,) = curves(render_figure(columns))

    assert [x for x, _ in points(curve)] == [0, 800, 2400]


def test_axis_with_many_points_has_fewer_ticks() -> None:
    columns = sweep_columns(name="nodes")
    columns.arrays["nodes"][:] = (1000, 1001, 4000)

    assert "1,001" not in ticks(render_figure(columns))


def test_sweep_draws_rates_with_interval_and_peak() -> None:
    picture = render_figure(sweep_columns())
    curve, bars = picture.one("svg", "plot").all("path", "line")[1:]

    assert picture.one("figcaption").words == "Rate"
    assert "4 GB/s4 GB/s" in ticks(picture)  # The text includes its tooltip.
    assert [y for _, y in points(curve)] == [800, 600, 200]
    # The longest time is the lowest rate: 1 / 1.25 at least, 1 / 0.8 at most.
    assert str(bars.attributes["d"]).startswith("M0 840V750")
    assert [y for _, y in points(picture.one("svg", "plot").one("path", "limit"))] == [0, 0, 0]
    assert [item.words for item in picture.all("li")] == ["read", "peak"]


def test_equal_peaks_are_one_line_in_shared_colour() -> None:
    columns = sweep_columns(lines=2, limits=(NAN, 5e9, 5e9))

    limit = render_figure(columns).one("svg", "plot").one("path", "limit")
    assert "shared" in str(limit.attributes["class"])
    assert [x for x, _ in points(limit)] == [1200, 2400]


def test_different_peaks_have_colours_of_their_curves() -> None:
    columns = sweep_columns(lines=2)
    columns.arrays["limit_s"][:3] /= 2

    first, second = render_figure(columns).one("svg", "plot").all("path", "limit")
    assert "s0" in str(first.attributes["class"])
    assert "s1" in str(second.attributes["class"])
    names = columns.text["line"]
    assert [path.one("title").words for path in (first, second)] == [
        f"peak of {name}" for name in names
    ]


def test_sweep_without_peaks_has_no_peak_in_legend() -> None:
    picture = render_figure(sweep_columns(limits=(NAN, NAN, NAN)))

    assert picture.all("li") == []
    assert picture.all("path", "limit") == []


def test_curves_of_different_height_share_logarithmic_axis() -> None:
    columns = sweep_columns(lines=2, limits=(NAN, NAN, NAN))
    columns.arrays["amount"][3:] *= 100

    low, high = curves(render_figure(columns))
    heights = [y for _, y in points(low)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=1)
    assert points(high)[0][1] < points(low)[2][1]


def test_curve_far_below_peak_has_logarithmic_axis() -> None:
    (curve,) = curves(render_figure(sweep_columns(limits=(9e11, 9e11, 9e11))))

    heights = [y for _, y in points(curve)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=1)


def test_sweep_of_latencies_draws_time() -> None:
    picture = render_figure(timed())

    assert picture.one("figcaption").words == "Time"
    assert "100 us100 us" in ticks(picture)


def test_sweep_draws_fit_and_points() -> None:
    picture = render_figure(timed(fit=2.0))

    assert picture.one("figcaption").words == "Time; lines: fixed + per node × number of nodes"
    (curve,) = curves(picture)
    marks = picture.one("svg", "plot").one("path", "scatter")
    assert all(y < mark for (_, y), (_, mark) in zip(points(curve), points(marks), strict=True))


def test_legend_names_lines_and_title_names_panel() -> None:
    picture = render_figure(sweep_columns(lines=2, name="size_bytes: pinned"))

    assert [item.words for item in picture.all("li")] == ["read", "write", "peak"]
    assert len(picture.one("svg", "plot").all("path", "s1")) == 3
    assert picture.one("figcaption").words == "Rate, pinned"


def test_baseline_has_same_colour_with_dashes() -> None:
    cudakit_curve, baseline_curve = curves(render_figure(sweep_columns(lines=2, library=1)))

    assert str(cudakit_curve.attributes["class"]) == "line s0 dash0"
    assert str(baseline_curve.attributes["class"]) == "line s0 dash1"


# --- roofline


def roofline_columns(
    *,
    rate: float = 700e12,
    baseline: bool = False,
    intensities: tuple[float, ...] = (100.0, 2000.0),
) -> Columns:
    return Columns(
        "roofline",
        {
            "case": np.arange(2),
            "kind": np.arange(2),
            "near": np.arange(2),
            "library": np.array([0, int(baseline)]),
            "operations_per_byte": np.array(intensities),
            "operations_per_s": np.array([300e12, rate]),
            "peak_operations_per_s": np.full(2, 800e12),
            "peak_bytes_per_s": np.full(2, 4e12),
            "unit": np.zeros(2, np.int64),
        },
        {
            "case": ("bf16 256³", "fp16 8192³"),
            "kind": ("bf16", "fp16"),
            "near": ("256³", "8192³"),
            "library": ("cudakit", "torch") if baseline else ("cudakit",),
            "unit": ("FLOP",),
        },
    )


def labels(picture: Node) -> list[str]:
    return [node.words for node in picture.all("text", "outlined")]


def test_roof_bends_at_ridge_above_cases() -> None:
    picture = render_figure(roofline_columns())

    (left, rising), (ridge, roof), (right, flat) = points(picture.one("path", "roof"))
    dots = sorted(points(path)[0] for path in picture.one("svg", "plot").all("path", "case"))
    assert 0 <= left < ridge
    assert right == 2400
    assert rising > roof == flat
    assert dots[0][0] < ridge < dots[1][0]
    assert all(y > roof for _, y in dots)


def test_case_at_peak_is_drawn_on_roof() -> None:
    picture = render_figure(roofline_columns(rate=800e12))

    roof = points(picture.one("path", "roof"))[1][1]
    heights = [points(path)[0][1] for path in picture.one("svg", "plot").all("path", "case")]
    assert min(heights) == roof


def test_roofs_and_dots_have_labels() -> None:
    picture = render_figure(roofline_columns())

    assert labels(picture) == [
        *("bf16, fp16: 800 TFLOP/s", "memory: 4 TB/s", "256³", "8192³"),
    ]
    assert [item.words for item in picture.all("li")] == ["bf16", "fp16"]
    assert "300 TFLOP/s300 TFLOP/s" in ticks(picture)


def test_overlapping_dots_have_one_label_and_all_tooltips() -> None:
    item = roofline_columns()
    repeated_arrays = {key: np.repeat(array[:1], 9) for key, array in item.arrays.items()}
    picture = render_figure(Columns(item.name, repeated_arrays, item.text))

    assert labels(picture)[2:] == ["256³"]
    message = [path.one("title").words for path in picture.one("svg", "plot").all("path", "case")]
    assert message == ["bf16 256³: 300 TFLOP/s"] * 9


def test_labelled_dot_is_drawn_above_dots_that_overlap_it() -> None:
    picture = render_figure(roofline_columns(rate=300e12, intensities=(100.0, 100.0)))

    assert labels(picture)[2:] == ["256³"]
    drawn_dots = [
        path.one("title").words for path in picture.one("svg", "plot").all("path", "case")
    ]
    assert drawn_dots == ["fp16 8192³: 300 TFLOP/s", "bf16 256³: 300 TFLOP/s"]


def test_baseline_is_ring_below_dot_with_one_label() -> None:
    picture = render_figure(roofline_columns(baseline=True))

    kinds = [
        str(path.attributes["class"]).split()[1]
        for path in picture.one("svg", "plot").all("path", "scatter")
    ]
    assert kinds == ["ring", "hole", "case"]
    assert [item.words for item in picture.all("li")] == ["bf16", "fp16", "torch"]
    assert labels(picture)[2:] == ["256³"]


# --- relative rates


def relative_rate_columns(*intervals: tuple[float, float, float]) -> Columns:
    low, ratio, high = np.array(intervals).T
    return Columns(
        "vs torch",
        {"case": np.arange(len(intervals)), "low": low, "ratio": ratio, "high": high},
        {"case": tuple(f"{64 << intensities}³" for intensities in range(len(intervals)))},
    )


def test_relative_rate_of_100_percent_is_centred() -> None:
    picture = render_figure(
        relative_rate_columns((0.97, 0.98, 0.99), (0.999, 1.0, 1.001), (1.0, 1.02, 1.03))
    )

    positions = [points(path)[0][0] for path in picture.all("path", "case")]
    assert positions[0] < positions[1] == 1200 < positions[2]
    assert "as fast as torch" in ticks(picture)
    assert picture.all("text", "remark")[0].words == "98.0% ± 1.0%"


def test_relative_rate_axis_has_minimum_extent() -> None:
    picture = render_figure(relative_rate_columns((1.0, 1.0, 1.0)))

    assert {"99%", "101%"} < set(ticks(picture)) or len(ticks(picture)) > 2


# --- distributions of samples


def samples(
    *,
    cases: int = 1,
    times: tuple[float, ...] = (0.9e-3, 1e-3, 1e-3, 1.2e-3),
    rounds: tuple[int, ...] = (),
) -> tuple[Columns, Columns]:
    middle = np.full(cases, np.median(times))
    return Columns(
        "samples",
        {
            "case": np.repeat(np.arange(cases), len(times)),
            "time_s": np.tile(times, cases),
            "sm_clock_hz": np.full(cases * len(times), NAN),
            "round": np.tile(rounds or np.zeros(len(times), np.int64), cases),
        },
        {"case": tuple(f"copy {i}" for i in range(cases))},
    ), Columns("results", {"ci95_low_s": middle * 0.95, "ci95_high_s": middle * 1.05})


def extent(box: Node) -> tuple[int, int]:
    left = int(str(box.attributes["x"]))
    return left, left + int(str(box.attributes["width"]))


def test_lane_draws_samples_in_order_around_median() -> None:
    picture = render_figure(*samples())

    (dots,) = picture.all("path", "scatter")
    positions = [x for x, _ in points(dots)]
    (median,) = (x for x, _ in points(picture.one("path", "line")))
    assert sorted(positions)[1:3] == [median, median]
    assert [y for _, y in points(dots)] == [50, 150, 250, 350]
    assert {"median", "+10%", "-10%"} <= set(ticks(picture))
    assert picture.one("text", "remark").words == "1.00 ms, 4 samples"


def test_lane_shades_interquartile_range_and_ci() -> None:
    picture = render_figure(*samples())

    quartiles, interval = (extent(picture.one("rect", kind)) for kind in ("half", "interval"))
    (median,) = (x for x, _ in points(picture.one("path", "line")))
    assert quartiles[0] < median < quartiles[1]
    assert median - interval[0] == pytest.approx(interval[1] - median, abs=1)
    unknown = samples()
    unknown[1].arrays["ci95_low_s"][:] = NAN
    assert render_figure(*unknown).all("rect", "interval") == []


def test_each_round_has_line_at_its_median() -> None:
    picture = render_figure(*samples(times=(1e-3, 1e-3, 1.1e-3, 1.1e-3), rounds=(0, 0, 1, 1)))

    (first, top), (second, bottom) = (points(path)[0] for path in picture.all("path", "line"))
    assert first < second
    assert top < 200 < bottom


def test_samples_beyond_axis_are_counted() -> None:
    times = (*np.linspace(1e-3, 1.01e-3, 999).tolist(), 5.0)
    remark = render_figure(*samples(times=times)).one("text", "remark").words

    assert remark.endswith(", 1,000 samples, 1 beyond")


def test_outliers_do_not_compress_lane() -> None:
    times = (*np.linspace(1e-3, 1.01e-3, 40).tolist(), 5e-3)
    picture = render_figure(*samples(times=times))

    assert picture.one("text", "remark").words.endswith(", 41 samples, 1 beyond")
    assert "+100%" not in ticks(picture)


def test_equal_samples_are_drawn_at_median() -> None:
    picture = render_figure(*samples(times=(1e-6,) * 20))

    assert points(picture.one("path", "line"))[0][0] == 1200


def test_cases_beyond_forty_lanes_are_counted() -> None:
    picture = render_figure(*samples(cases=45))

    assert len(picture.all("path", "scatter")) == 40
    assert picture.all("p")[-1].words == "5 more cases are not drawn."


def test_cases_without_samples_have_no_lane() -> None:
    columns, figures = samples(cases=2)
    columns.arrays["case"][:] = 1

    assert [name.words for name in render_figure(columns, figures).all("text", "name")] == [
        "copy 1"
    ]
    columns.arrays["time_s"][:] = 0
    assert render_page(columns, figures).one("p").words == "No samples."


# --- all drawings


@pytest.mark.parametrize(
    "columns",
    [
        (sweep_columns(),),
        (timed(),),
        (roofline_columns(baseline=True),),
        (relative_rate_columns((0.9, 1, 1.1)),),
        samples(),
    ],
)
def test_page_escapes_names_from_files(columns: tuple[Columns, ...]) -> None:
    first, *others = columns
    hostile = {
        name: ("<script>", "\x1b[0m", "'\"&")[: len(words)] for name, words in first.text.items()
    }
    columns = (Columns(first.name, first.arrays, hostile), *others)
    view = View(
        "drawing",
        tuple(item.name for item in columns),
        DRAWINGS[first.name.split(" ")[0]],
        Note("info", "no"),
    )
    page = render(Document("bench", (*columns, view)))

    assert "<script>" not in page
    assert "\x1b" not in page
    assert len(read(page).all("figure")) == 1
