"""Generate random events, for tests of traces."""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from cudakit.trace.events import Event, Fact, Text
from cudakit.trace.kinds import Mode

FACTS: tuple[type[Fact], ...] = get_args(Fact)


def events() -> st.SearchStrategy[Event]:
    fact = st.sampled_from(FACTS).flatmap(lambda made: _made(made))
    return fact.flatmap(lambda found: _made(Event, fact=st.just(found)))


def _made(made: type[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(made, include_extras=True)
    names = [field.name for field in fields(made) if field.name not in given]
    return st.builds(made, **given, **{name: _values(hints[name]) for name in names})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if hint is Text:
        return st.text("aZ0 é漢\n", max_size=8)
    if get_origin(hint) is Annotated:
        return _numbers(np.dtype(hint.__metadata__[0]))
    if hint is Mode:
        return st.integers(0, 7).map(Mode)
    assert issubclass(hint, IntEnum)
    return st.sampled_from(list(hint))


def _numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype.shape:
        return st.tuples(*[_numbers(dtype.base)] * dtype.shape[0])
    if dtype.kind == "b":
        return st.booleans()
    info = np.iinfo(dtype)
    return st.integers(int(info.min), int(info.max))
