"""Generate random events, for tests of traces."""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from cudakit.trace.events import Event, EventBody, Text
from cudakit.trace.kinds import AccessMode

BODIES: tuple[type[EventBody], ...] = get_args(EventBody)


def events() -> st.SearchStrategy[Event]:
    bodies = st.sampled_from(BODIES).flatmap(lambda body_class: _instances(body_class))
    return bodies.flatmap(lambda body: _instances(Event, body=st.just(body)))


def _instances(
    class_: type[Any], **field_strategies: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Generate instances of a dataclass; fields without a strategy get values of their type."""
    hints = get_type_hints(class_, include_extras=True)
    others = [field.name for field in fields(class_) if field.name not in field_strategies]
    return st.builds(class_, **field_strategies, **{name: _values(hints[name]) for name in others})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if hint is Text:
        return st.text("aZ0 é漢\n", max_size=8)
    if get_origin(hint) is Annotated:
        return _numbers(np.dtype(hint.__metadata__[0]))
    if hint is AccessMode:
        return st.integers(0, 7).map(AccessMode)
    assert issubclass(hint, IntEnum)
    return st.sampled_from(list(hint))


def _numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype.shape:
        return st.tuples(*[_numbers(dtype.base)] * dtype.shape[0])
    if dtype.kind == "b":
        return st.booleans()
    info = np.iinfo(dtype)
    return st.integers(int(info.min), int(info.max))
