"""The ranges of NVTX that are open at each record of a trace."""

from __future__ import annotations

from cudakit.trace.events import Event, EventBody, Launch, Mark, RangePop, RangePush
from cudakit.trace.names import RangeTracker
from cudakit.trace.trace_file import pack

LAUNCH = Launch(1, "k")


class Trace:
    """A trace that grows, and the names of the ranges that are open at its launches, outermost first."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {"": 0}
        self.tracker = RangeTracker()

    def at_launches(self, *bodies: EventBody | tuple[int, EventBody]) -> list[tuple[str, ...]]:
        """Add bodies, each of thread 1 or with its thread; return the names at the launches among them."""
        pairs = [body if isinstance(body, tuple) else (1, body) for body in bodies]
        events = [Event(body, thread=thread) for thread, body in pairs]
        records = pack(events, lambda text: self.strings.setdefault(text, len(self.strings)))
        innermost = self.tracker.follow(records)
        launches = [index for index, (_, body) in enumerate(pairs) if isinstance(body, Launch)]
        return [() if innermost is None else self.names(innermost[index]) for index in launches]

    def names(self, innermost: object) -> tuple[str, ...]:
        texts = list(self.strings)
        return tuple(texts[open_range.name] for open_range in innermost or ())[::-1]  # type: ignore[attr-defined]


def test_ranges_nest() -> None:
    outer, inner = RangePush("outer"), RangePush("inner")

    assert Trace().at_launches(
        LAUNCH, outer, LAUNCH, inner, LAUNCH, RangePop(), LAUNCH, RangePop(), LAUNCH
    ) == [(), ("outer",), ("outer", "inner"), ("outer",), ()]


def test_open_range_continues_in_next_batch() -> None:
    trace = Trace()

    assert trace.at_launches(RangePush("step"), LAUNCH) == [("step",)]
    assert trace.at_launches(LAUNCH) == [("step",)]
    assert trace.at_launches(RangePop(), LAUNCH) == [()]
    assert trace.tracker.follow(pack([Event(LAUNCH)], lambda _: 0)) is None


def test_range_belongs_to_its_thread() -> None:
    assert Trace().at_launches(
        (1, RangePush("main")), (2, LAUNCH), (2, RangePush("worker")), (1, LAUNCH), (2, LAUNCH),
        (1, RangePop()), (1, LAUNCH), (2, LAUNCH),
    ) == [(), ("main",), ("worker",), (), ("worker",)]  # fmt: skip


def test_end_closes_innermost_range_of_its_domain() -> None:
    assert Trace().at_launches(
        RangePush("step"), RangePush("all-reduce", "NCCL"), RangePush("inner"), LAUNCH,
        RangePop("NCCL"), LAUNCH, RangePop("NCCL"), LAUNCH, RangePop(), LAUNCH,
    ) == [("step", "all-reduce", "inner"), ("step", "inner"), ("step", "inner"), ("step",)]  # fmt: skip


def test_range_of_process_is_open_in_all_threads_until_any_ends_it() -> None:
    assert Trace().at_launches(
        (1, RangePush("epoch", number=7)), (2, RangePush("worker")), (2, LAUNCH), (3, LAUNCH),
        (3, RangePop(number=7)), (2, LAUNCH), (3, LAUNCH),
    ) == [("epoch", "worker"), ("epoch",), ("worker",), ()]  # fmt: skip


def test_range_of_process_contains_ranges_that_threads_opened_before_it() -> None:
    assert Trace().at_launches(
        RangePush("step"), LAUNCH, RangePush("epoch", number=7), LAUNCH, RangePush("layer"), LAUNCH,
        RangePop(number=7), LAUNCH, RangePop(), RangePush("loss"), LAUNCH,
    ) == [
        ("step",), ("epoch", "step"), ("epoch", "step", "layer"), ("step", "layer"), ("step", "loss"),
    ]  # fmt: skip


def test_marks_and_unmatched_ends_change_nothing() -> None:
    assert Trace().at_launches(RangePop(), RangePop(number=3), Mark("here"), LAUNCH) == [()]


def test_open_ranges_are_bounded() -> None:
    trace = Trace()
    for number in range(1, 3000):
        trace.at_launches(RangePush("a"), RangePush("b", number=number))

    assert len(trace.at_launches(LAUNCH)[0]) == 2 * 1024
