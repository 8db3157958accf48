"""What the variables of cuBLAS and cuDNN trade speed for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.core.devices.diagnose.settings import switched_on
from cudakit.gpu.api.run_context import RunContext

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_LT_WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"
_LT_LEAST_KIB = 1024
_WORKSPACE_FORM = re.compile(r"(:\d+:\d+)+")
_LOGS = {
    "CUBLAS_LOGINFO_DBG": "cuBLAS writes a line for every call",
    "CUBLASLT_LOG_LEVEL": "cuBLASLt writes lines for every call",
    "CUBLASLT_LOG_MASK": "cuBLASLt writes lines for every call",
    "CUDNN_LOGINFO_DBG": "cuDNN writes lines for every call",
    "CUDNN_LOGLEVEL_DBG": "cuDNN writes lines for every call",
}


def math_settings(c: RunContext) -> Finding:
    """Variables of cuBLAS and cuDNN trade speed for precision, determinism or logs.

    NVIDIA_TF32_OVERRIDE=0 forbids TF32 everywhere: float32 products then do without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does the opposite, at less precision than a program may expect.
    CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 is what torch.use_deterministic_algorithms asks for; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small one forbids the fast kernels.
    """
    told = {name: c.variables[name] for name in _math_names(c.variables)}
    return together(
        _math_findings(c.variables),
        otherwise=ok(f"nothing in {', '.join(told)} slows cuBLAS down", told)
        if told
        else ok("cuBLAS and cuDNN have their default settings"),
    )


def _math_names(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        if name.startswith(("CUBLAS", "CUDNN_")) or "TF32" in name:
            yield name


def _math_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in switched_on(environment, _LOGS):
        yield warn(f"{name}={value}: {_LOGS[name]}", {name: value}, f"unset {name}")
    for name, value, what in (
        ("NVIDIA_TF32_OVERRIDE", "0", "no library uses TF32, and float32 products are far slower"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "float32 products have the precision of TF32"),
    ):
        if environment.get(name) == value:
            yield warn(f"{name}={value}: {what}", {name: value}, f"unset {name}")
    workspace = environment.get(_WORKSPACE)
    if workspace is not None and not _WORKSPACE_FORM.fullmatch(workspace):
        yield warn(
            f"{_WORKSPACE}={workspace} has not the form :KiB:count",
            {_WORKSPACE: workspace},
            f"export {_WORKSPACE}=:4096:8",
        )
    size = environment.get(_LT_WORKSPACE, "")
    if size.isdecimal() and int(size) < _LT_LEAST_KIB:
        yield warn(
            f"{_LT_WORKSPACE}={size} KiB is too little for cuBLASLt's fast kernels",
            {_LT_WORKSPACE: size},
            f"unset {_LT_WORKSPACE}",
        )
