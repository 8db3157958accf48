"""Why an executable graph could not be updated: what the bindings leave out of their answer.

Where cuGraphExecUpdate fails, cuda-bindings (12.9, 13) return its status, and no
CUgraphExecUpdateResultInfo. An executable that could not be updated is as it was, so that the driver can
be asked again, directly.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cudakit.gpu.cuda.driver import check, cu

# The version since which cuGraphExecUpdate fills a CUgraphExecUpdateResultInfo (CUDA Driver API,
# "Graph Management"; cuda.h of CUDA 12).
_SINCE = 12000


class _ResultInfo(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    )


def why_not(executable: Any, graph: Any) -> str:
    """Name what keeps an executable from becoming a graph: a value of CUgraphExecUpdateResult."""
    plain = cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _ = check(cu.cuGetProcAddress(b"cuGraphExecUpdate", _SINCE, plain))
    update = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(int(address))
    info = _ResultInfo()
    update(int(executable), int(graph), ctypes.addressof(info))
    return _name(info.result)


def _name(result: int) -> str:
    try:
        name: str = cu.CUgraphExecUpdateResult(result).name
    except ValueError:
        return f"CUgraphExecUpdateResult {result}"
    return name
