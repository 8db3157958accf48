"""Which environment variables change what CUDA does, and is one of them misspelt?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.gpu.api.run_context import RunContext

_OFF = ("", "0", "false", "no", "off")

# Variables that cost speed or forbid something while they are on, and what each does (CUDA Programming
# Guide, CUDA Environment Variables; of PyTorch and Numba, the pages on their variables).
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch waits until the kernel is done",
    "CUDA_CACHE_DISABLE": "kernels made from PTX are compiled again in every process",
    "CUDA_FORCE_PTX_JIT": "machine code is ignored, and every kernel compiled from PTX at start",
    "CUDA_FORCE_JIT": "machine code is ignored, and every kernel compiled from PTX at start",
    "CUDA_DISABLE_PTX_JIT": "kernels that exist as PTX only do not run",
    "CUDA_DISABLE_JIT": "kernels that exist as PTX only do not run",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION": "the GPU halts at an error and waits for a debugger",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "an error writes the GPU's memory to a file",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is a cudaMalloc, and a cudaFree that waits",
    "NUMBA_ENABLE_CUDASIM": "Numba's kernels run on the CPU, in its simulator",
    "NUMBA_DISABLE_CUDA": "Numba uses no GPU",
}

# Names that, slightly misspelt, do nothing without a word. A name that begins like one of these and is
# none that anything reads is not looked at: only near misses are.
_MEANT = (
    *_SLOW,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_INJECTION64_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
# Near to one of the above, and real.
_REAL = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DEBUG_FILE",
    "CUDA_INJECTION32_PATH",
)
_PREFIXES = ("CUDA", "NVIDIA_", "CUBLAS", "PYTORCH_", "NCCL_", "TORCH_")
# One letter more, less or other in a name of average length.
_CLOSE = 0.93


def nothing_slows(c: RunContext) -> Finding:
    """Some variables exist to find errors, and cost much speed when they are left set.

    CUDA_LAUNCH_BLOCKING=1 is the best known: every launch waits, so nothing overlaps. Others compile
    each kernel anew, switch PyTorch's memory cache off, or send Numba to the CPU.
    """
    return together(
        (
            warn(f"{name}={value}: {_SLOW[name]}", {name: value}, f"unset {name}")
            for name, value in switched_on(c.variables, _SLOW)
        ),
        otherwise=ok("no variable for finding errors slows CUDA down"),
    )


def switched_on(
    environment: Mapping[str, str], names: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Give the variables among ``names`` that are set to anything but off."""
    for name in names:
        value = environment.get(name, "")
        if value.strip().lower() not in _OFF:
            yield name, value


def nothing_misspelt(c: RunContext) -> Finding:
    """A variable whose name is misspelt does nothing, and nobody says so.

    CUDA_VISIBLE_DEVICE=1 (without the S) hides no device. Names that are one letter away from a
    variable that CUDA, NCCL, cuBLAS or PyTorch reads are pointed out.
    """
    return together(
        (
            warn(
                f"nothing reads {name}; {meant} is the variable",
                {name: c.variables[name]},
                f"export {meant}={c.variables[name]}; unset {name}",
            )
            for name in sorted(c.variables)
            for meant in _meant(name)
        ),
        otherwise=ok("no variable's name is nearly that of another"),
    )


def _meant(name: str) -> list[str]:
    upper = name.upper()
    if name in (*_MEANT, *_REAL) or not upper.startswith(_PREFIXES):
        return []
    return get_close_matches(upper, _MEANT, n=1, cutoff=_CLOSE)
