"""The compiled reader of pickles of plain data, ``native/pickled/module.c``; ``pickled.py`` wraps it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

class PickledTree:
    """The parsed content of a pickle of plain data. It keeps the buffer exported.

    Raises ValueError(reason word, offset) if the file is rejected, ValueError("kind", kind of the node) if a
    node is of the wrong kind, ValueError("keys", "a dictionary") if ``members`` gets more than ``max_keys``
    keys, and IndexError if a handle is invalid. Parsing takes at most about ``memory_limit`` bytes. The last
    arrays of each method receive the results.
    """

    def __new__(
        cls,
        buffer: bytes,
        seed: bytes,
        convert: Callable[[int, bytes], bool | float | str | bytes],
        memory_limit: int,
        max_keys: int,
    ) -> PickledTree: ...
    @property
    def root(self) -> int: ...
    def kind(self, handle: int, /) -> str: ...
    def length(self, handle: int, /) -> int: ...
    def texts(self, handles: npt.NDArray[np.uint64], /) -> list[str]: ...
    def scalar(self, handle: int, /) -> Any: ...
    def members(self, handle: int, /) -> dict[str, int]: ...
    def lengths(self, lists: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64], /) -> None: ...
    def gather(self, lists: npt.NDArray[np.uint64], items: npt.NDArray[np.uint64], /) -> None: ...
    def column(
        self, dicts: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64], key: str, /
    ) -> None: ...
    def integers(
        self,
        handles: npt.NDArray[np.uint64],
        numbers: npt.NDArray[np.int64],
        is_integer: npt.NDArray[np.bool_],
        /,
    ) -> None: ...
    def intern(
        self,
        handles: npt.NDArray[np.uint64],
        ids: npt.NDArray[np.int32],
        nodes: npt.NDArray[np.uint64],
        /,
    ) -> None: ...
