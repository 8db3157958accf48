"""Readable names of mangled C++ symbols (Itanium C++ ABI, section 5.1)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

# numpy's modules link this library, so that it is present.
_LIBRARY = "libstdc++.so.6"

# No compiler produces longer names for kernels.
_LONGEST = 64 * 1024


def demangle(name: str) -> str:
    """Return the readable form of a mangled name, and any other name unchanged.

    By ``__cxa_demangle`` of the C++ runtime (Itanium C++ ABI, section 3.4). Without the runtime, names
    stay as they are.
    """
    if not name.startswith("_Z") or len(name) > _LONGEST:
        return name
    return _demangler()(name)


@cache
def _demangler() -> Callable[[str], str]:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return str
    function = library.__cxa_demangle
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]

    def readable(name: str) -> str:
        text = function(name.encode("utf-8", "surrogateescape"), None, None, None)
        if text is None:
            return name
        try:
            return ctypes.string_at(text).decode("utf-8", "surrogateescape")
        finally:
            free(text)

    return readable
