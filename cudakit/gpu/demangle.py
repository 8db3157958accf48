"""Demangling of C++ symbols (Itanium C++ ABI, section 5.1)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

# The C++ runtime. It is usually present, because numpy's extension modules link it.
_CPP_RUNTIME = "libstdc++.so.6"

# Maximum length of a name to demangle; kernel names are shorter in practice.
_MAX_NAME_LENGTH = 64 * 1024


def demangle(name: str) -> str:
    """Return the demangled form of a mangled name, and any other name unchanged.

    Uses ``__cxa_demangle`` of the C++ runtime (Itanium C++ ABI, section 3.4); without it, returns the name.
    """
    if not name.startswith("_Z") or len(name) > _MAX_NAME_LENGTH:
        return name
    return _demangler()(name)


@cache
def _demangler() -> Callable[[str], str]:
    try:
        library = ctypes.CDLL(_CPP_RUNTIME)
    except OSError:
        return str
    cxa_demangle = library.__cxa_demangle
    cxa_demangle.restype = ctypes.c_void_p
    cxa_demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    free_memory = ctypes.CDLL(None).free
    free_memory.argtypes = [ctypes.c_void_p]

    def demangle_with_library(name: str) -> str:
        demangled_address = cxa_demangle(name.encode("utf-8", "surrogateescape"), None, None, None)
        if demangled_address is None:
            return name
        try:
            return ctypes.string_at(demangled_address).decode("utf-8", "surrogateescape")
        finally:
            free_memory(demangled_address)

    return demangle_with_library
