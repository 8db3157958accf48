"""The pictures of a bench on the page."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup_tree import Node, read

from cudakit.document import Columns, Document, Note, View
from cudakit.render.html import render
from cudakit.render.svg.bench import bench
from cudakit.render.svg.scale import LogUnit, log_axis

NAN = float("nan")
SIZES = (2.0**10, 2.0**15, 2.0**20)


def drawn(made: Columns) -> Node:
    return read(bench([made])).one("figure")


def points(path: Node) -> list[tuple[int, int]]:
    found = re.findall(r"[ML](\d+) (\d+)", str(path.attributes["d"]))
    return [(int(x), int(y)) for x, y in found]


def ticks(picture: Node) -> list[str]:
    return [node.words for node in picture.all("text", "tick")]


# --- a sweep


def sweep(
    *, ratios: tuple[float, ...] = (0.2, 0.5, 1.0), name: str = "size_bytes", lines: int = 1
) -> Columns:
    times = np.tile([1e-6, 1e-5, 1e-3], lines)
    return Columns(
        f"sweep {name}",
        {
            "line": np.repeat(np.arange(lines), 3),
            name: np.tile(SIZES, lines),
            "median_s": times,
            "ci95_low_s": times * 0.9,
            "ci95_high_s": times * 1.25,
            "ratio_to_limit": np.tile(ratios, lines),
        },
        {"line": tuple(f"memory operation={word}" for word in ("read", "write")[:lines])},
    )


def test_a_wide_axis_is_logarithmic_with_ticks_at_powers_of_two() -> None:
    picture = drawn(sweep())

    curve, bars = picture.all("path", "line")
    assert [x for x, _ in points(curve)] == [0, 1200, 2400]
    assert {"1 KiB", "32 KiB", "1 MiB"} <= set(ticks(picture))
    assert len(points(bars)) == 3


def test_a_narrow_axis_is_not() -> None:
    made = sweep(name="nodes")
    made.arrays["nodes"][:] = (10, 20, 40)

    curve = drawn(made).all("path", "line")[0]

    assert [x for x, _ in points(curve)] == [0, 800, 2400]


def test_shares_of_the_limit_stand_under_it_and_their_interval_around_them() -> None:
    made = sweep(ratios=(0.2, 0.5, 0.75))
    curve, bars = drawn(made).all("path", "line")

    assert drawn(made).one("figcaption").words == "Share of the limit"
    assert [y for _, y in points(curve)] == [800, 500, 250]
    # The longest time is the smallest share: 0.2 / 1.25 at least, 0.2 / 0.9 at most.
    assert str(bars.attributes["d"]).startswith("M0 840V778")


def test_without_a_limit_the_time_is_drawn() -> None:
    picture = drawn(sweep(ratios=(0.2, NAN, 0.5)))

    assert picture.one("figcaption").words == "Time"
    assert "100 us100 us" in ticks(picture)  # with a tooltip


def test_several_lines_are_named() -> None:
    picture = drawn(sweep(lines=2))

    words = [item.words for item in picture.all("li")]
    assert words == ["memory operation=read", "memory operation=write"]
    assert len(picture.one("svg", "plot").all("path", "s1")) == 3


# --- the roofline


def roofline(*, reached: float = 700e12) -> Columns:
    return Columns(
        "roofline",
        {
            "case": np.arange(2),
            "operations_per_byte": np.array([100.0, 2000.0]),
            "operations_per_s": np.array([300e12, reached]),
            "peak_operations_per_s": np.full(2, 800e12),
            "peak_bytes_per_s": np.full(2, 4e12),
        },
        {"case": ("gemm m=256", "gemm m=8192")},
    )


def test_cases_stand_under_a_roof_that_bends_where_the_peaks_meet() -> None:
    picture = drawn(roofline())

    (left, rising), (ridge, roof), (right, flat) = points(picture.one("path", "roof"))
    dots = [points(path)[0] for path in picture.one("svg", "plot").all("path", "case")]
    assert (left, right) == (0, 2400)
    assert rising > roof == flat
    assert dots[0][0] < ridge < dots[1][0]
    assert all(y > roof for _, y in dots)
    assert [item.words for item in picture.all("li")] == ["gemm m=256", "gemm m=8192"]


def test_a_case_on_the_roof_is_drawn_on_it() -> None:
    picture = drawn(roofline(reached=800e12))

    roof = points(picture.one("path", "roof"))[1][1]
    assert points(picture.one("svg", "plot").all("path", "case")[1])[0][1] == roof


# --- samples


def samples(*, cases: int = 1, times: tuple[float, ...] = (0.9e-3, 1e-3, 1e-3, 1.2e-3)) -> Columns:
    return Columns(
        "samples",
        {
            "case": np.repeat(np.arange(cases), len(times)),
            "time_s": np.tile(times, cases),
            "sm_clock_hz": np.full(cases * len(times), NAN),
        },
        {"case": tuple(f"copy number={i}" for i in range(cases))},
    )


def test_a_lane_shows_the_samples_around_their_median() -> None:
    picture = drawn(samples())

    (dots,) = picture.all("path", "scatter")
    places = [x for x, _ in points(dots)]
    (median,) = (x for x, _ in points(picture.one("path", "line")))
    assert sorted(places)[1:3] == [median, median]
    assert "median" in ticks(picture)
    assert picture.one("tspan", "remark").words == "1 ms, 4 samples"


def test_samples_far_out_are_counted() -> None:
    times = (*np.linspace(1e-3, 1.01e-3, 999).tolist(), 5.0)
    remark = drawn(samples(times=times)).one("tspan", "remark").words

    assert remark.endswith(", 1,000 samples, 1 beyond")


def test_samples_that_are_all_the_same_have_a_picture() -> None:
    picture = drawn(samples(times=(1e-6,) * 20))

    assert points(picture.one("path", "line"))[0][0] == 1200


def test_beyond_forty_lanes_the_rest_is_named() -> None:
    picture = drawn(samples(cases=45))

    assert len(picture.all("path", "scatter")) == 40
    assert picture.one("p").words == "5 more cases are not drawn."


def test_cases_without_samples_have_no_lane() -> None:
    made = samples(cases=2)
    made.arrays["case"][:] = 1

    assert [name.words for name in drawn(made).all("tspan", "name")] == ["copy number=1"]
    made.arrays["time_s"][:] = 0
    assert read(bench([made])).one("p").words == "No samples."


# --- all of them


@pytest.mark.parametrize("made", [sweep(), roofline(), samples()])
def test_a_page_draws_it_and_words_from_a_file_are_harmless(made: Columns) -> None:
    hostile = {name: ("<script>", "\x1b[0m")[: len(words)] for name, words in made.text.items()}
    columns = Columns(made.name, made.arrays, hostile)
    page = render(Document("bench", (columns, View("bench", (made.name,), Note("info", "no")))))

    assert "<script>" not in page
    assert "\x1b" not in page
    assert len(read(page).all("figure")) == 1


@given(
    st.floats(1e-9, 1e15),
    st.floats(1.0, 1e12),
    st.sampled_from(["bytes", "seconds", "count", "rate"]),
)
def test_a_logarithmic_axis_has_few_ticks_and_all_are_on_it(
    low: float, factor: float, unit: LogUnit
) -> None:
    axis = log_axis(low, low * factor, unit)

    shares = [axis.share(tick.value) for tick in axis.ticks]
    assert 1 <= len(shares) <= 12
    assert shares == sorted(set(shares))
    assert all(-1e-6 <= share <= 1 + 1e-6 for share in shares)
    assert axis.share(low) <= axis.share(low * factor)
    assert axis.shares(np.array([axis.low, axis.high])) == pytest.approx([0, 1])
