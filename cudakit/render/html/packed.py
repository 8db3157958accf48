"""Arrays as text inside a page: byte planes, deflated, in base64.

The script ``arrays.js`` reads what this module writes.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.document import Array

# zlib's default: level 9 takes several times as long for 1 % fewer bytes.
_LEVEL = 6
_TYPES = {"u1": np.uint8, "i4": np.int32, "u4": np.uint32, "u8": np.uint64, "i8": np.int64}


def pack(arrays: Mapping[str, Array]) -> tuple[list[dict[str, Any]], str]:
    """Return the description of each array, and all arrays as one base64 text.

    An array of integers becomes integers of 1, 4 or 8 bytes. If it never decreases, its differences
    are stored instead of its values. The bytes of one significance are stored together (byte planes), because
    deflate finds more repetitions in them than in whole numbers. The script reads numbers of 8 bytes as
    floating-point numbers, which are exact below 2**53.
    """
    described, planes = [], []
    for name, array in arrays.items():
        values, is_sum = _differences(np.asarray(array))
        kind = _kind(values)
        described.append({"name": name, "type": kind, "length": len(values), "sum": is_sum})
        little_endian = values.astype(np.dtype(_TYPES[kind]).newbyteorder("<"))
        planes.append(
            little_endian.view(np.uint8).reshape(len(values), little_endian.itemsize).T.tobytes()
        )
    return described, b64encode(zlib.compress(b"".join(planes), _LEVEL)).decode("ascii")


def _differences(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], bool]:
    if values.dtype == np.uint8 or len(values) < 2:
        return values, False
    differences = np.diff(values.astype(np.int64), prepend=0)
    return (differences, True) if differences[1:].min() >= 0 else (values, False)


def _kind(values: npt.NDArray[Any]) -> str:
    if values.dtype in (np.uint8, np.bool_):
        return "u1"
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0:
        return "i4" if low >= -(1 << 31) and high < 1 << 31 else "i8"
    return "u4" if high < 1 << 32 else "u8"
