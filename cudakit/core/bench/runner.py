"""The runner: warm up, take samples until there are enough, verify; several workloads in turn.

It decides on nothing by itself: the method says how, the stopping rule when, the timer how long.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TypeAlias

from cudakit.core.bench.course import Course
from cudakit.core.bench.measured import Measured
from cudakit.core.bench.method import Method
from cudakit.core.bench.rounds import parts, whole
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.workload import Workload

Progress: TypeAlias = Callable[[str, float], None]


def measure(
    timer: Timer,
    workloads: Sequence[Workload],
    method: Method,
    *,
    seed: int = 0,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
    pause: Callable[[float], None] = time.sleep,
    hurry: bool | None = None,
) -> tuple[Measured, ...]:
    """Measure workloads by one method; several take turns, a sample each, so that all meet the same clock.

    Each round has buffers of its own. Values are verified before the first sample of it and after the last;
    what is wrong keeps no sample. An interrupt ends it with what there is by then, and goes on where nothing
    is; ``progress``, which is told after each sample, may raise it where nothing is half done. ``hurry`` does
    not wait for time to pass, which it does not by itself on a simulated device: there it is the default.

    Raises UsageError for a method that cannot be carried out, and what workloads and device raise.
    """
    if timer.gpu.simulated if hurry is None else hurry:
        method = _hurried(method)
    names = tuple(workload.name for workload in workloads) if len(workloads) > 1 else ()
    method = replace(method, seed=seed, interleaved=method.interleaved or names)
    found: list[list[Measured]] = [[] for _ in workloads]
    try:
        for number, part in enumerate(parts(method)):
            tell = _part(progress, number, method.rounds)
            measured = _round(timer, workloads, part, tell, pause)
            for rounds, one in zip(found, measured, strict=True):
                rounds.extend([one] if one else [])
            if any(one is None or one.broken_off for one in measured):
                break
    except KeyboardInterrupt:
        if not all(found):
            raise
        for rounds in found:
            rounds[-1] = replace(rounds[-1], stopped="interrupted")
    return tuple(whole(rounds, method) for rounds in found if rounds)


def _round(
    timer: Timer,
    workloads: Sequence[Workload],
    method: Method,
    progress: Progress,
    pause: Callable[[float], None],
) -> tuple[Measured | None, ...]:
    """Measure each workload on buffers of its own; None is one that an interrupt left without samples."""
    with ExitStack() as stack:
        courses: list[Course] = []
        try:
            # All are there before the first takes more buffer sets of the memory that is left.
            prepared = [
                stack.enter_context(closing(workload.prepare(timer.gpu, method.seed)))
                for workload in workloads
            ]
            for workload, ready in zip(workloads, prepared, strict=True):
                course = Course(timer, workload, ready, method, pause)
                courses.append(stack.enter_context(closing(course)))
            with collector_off():
                _run(courses, progress)
        except KeyboardInterrupt:
            if not any(course.has_samples for course in courses):
                raise
        timer.gpu.sync_stream(timer.stream)  # an interrupt leaves work behind
        return tuple(
            course.conclude() if course.has_samples or course.is_wrong else None
            for course in courses
        )


def _run(courses: Sequence[Course], progress: Progress) -> None:
    left = [course for course in courses if not course.is_wrong]
    for course in left:
        for fraction in course.warm_up():
            progress(f"{course.title}: warming up", fraction)
    for course in left:
        course.begin()
    # Whoever has enough goes on until all have: each sample shall follow one of every other.
    while not all(course.done for course in left):
        for course in left:
            course.sample()
        going = [course for course in left if not course.done] or left
        progress(going[0].title, min(course.fraction for course in going))
    for course in left:
        course.end()
    for course in left:
        for fraction in course.count_energy():
            progress(f"{course.title}: counting energy", fraction)


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector from running amid a sample."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _hurried(method: Method) -> Method:
    """Return the method without the times that are only there for a real device to settle in."""
    return replace(
        method, warmup_s=0.0, energy_s=0.0, rounds=1, rule=replace(method.rule, min_time_s=0.0)
    )


def _part(progress: Progress, at: int, count: int) -> Progress:
    """Tell of the progress of one round as that of all."""
    return lambda stage, fraction: progress(stage, (at + fraction) / count)
