"""Contenders: those who run a case in turn. Who cannot is left out, and remembers why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from cudakit.core.bench.case import Case
from cudakit.core.bench.measured import Measured
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import Axis
from cudakit.core.bench.runner import Progress, measure
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.workload import Prepared, RefusedLater, Workload
from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu

# Who runs a workload of ours.
OURSELVES = "cudakit"


@runtime_checkable
class Configured(Protocol):
    """What knows how it was set up, for the record."""

    @property
    def settings(self) -> Mapping[str, Axis]: ...


class Contender:
    """A workload, who runs it, and what is remembered of how it was prepared."""

    def __init__(self, workload: Workload, by: str = OURSELVES) -> None:
        self.by = by
        # Results are told apart by it.
        self.name = workload.name if by == OURSELVES else f"{workload.name} by {by}"
        self.settings: Mapping[str, Axis] = {}
        self.refusal: Unsupported | None = None
        self._workload = workload

    @property
    def axes(self) -> Mapping[str, Axis]:
        return self._workload.axes

    def prepare(self, gpu: Gpu, seed: int) -> Prepared:
        try:
            prepared = self._workload.prepare(gpu, seed)
        except Unsupported as refusal:
            self.refusal = refusal
            raise
        self.settings = dict(prepared.settings) if isinstance(prepared, Configured) else {}
        return prepared


def contenders_of(case: Case) -> tuple[Contender, ...]:
    """Return who runs a case, ourselves first."""
    rivals = (Contender(rival, rival.library) for rival in case.rivals)
    return (Contender(case.workload), *rivals)


def contend(
    timer: Timer,
    contenders: Sequence[Contender],
    method: Method,
    *,
    seed: int,
    progress: Progress,
) -> Mapping[str, Measured]:
    """Measure in turn all who can run it, and return what there is of each, by its name.

    Who refuses does so before anything of it is allocated; the others begin again without it.
    """
    while able := [one for one in contenders if one.refusal is None]:
        turns = replace(method, interleaved=_names(able))
        try:
            found = measure(timer, able, turns, seed=seed, progress=progress)
        except RefusedLater as refusal:
            for one in able:
                if one is refusal.workload:
                    one.refusal = refusal
            continue
        except Unsupported:
            if all(one.refusal is None for one in able):
                raise
            continue
        return {measured.name: measured for measured in found}
    return {}


def _names(contenders: Sequence[Contender]) -> tuple[str, ...]:
    """Name those who take turns: by who they are, or where that is the same, by what tells them apart."""
    if len(contenders) < 2:
        return ()
    who = tuple(one.by for one in contenders)
    if len(set(who)) == len(who):
        return who
    first, *others = (one.axes for one in contenders)
    telling = [name for name in first if any(axes.get(name) != first[name] for axes in others)]
    return tuple(" ".join(str(one.axes.get(name)) for name in telling) for one in contenders)
