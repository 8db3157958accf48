"""Checks of environment variables (CK020 to CK024): a table of rules, and what needs more than a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from cudakit.core.devices.diagnose.check import Finding, combine, ok, warn
from cudakit.errors import InputError
from cudakit.gpu.api.run_context import RunContext
from cudakit.torch_rules.settings import PYTORCH_VARIABLES, parse_config

_OFF = ("", "0", "false", "no", "off")
_LT_LEAST_KIB = 1024
_WORKSPACE_FORM = re.compile(r"(:\d+:\d+)+")


@dataclass(frozen=True, slots=True)
class VariableRule:
    """A variable, the values that get a warning, and the warning; {name} and {value} are filled in."""

    name: str
    applies: Callable[[str], bool]
    message: str
    fix: str = "unset {name}"


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF


def _switches(effects: Mapping[str, str], fix: str = "unset {name}") -> tuple[VariableRule, ...]:
    """Return rules for variables that have an effect while they are on."""
    return tuple(
        VariableRule(name, _is_on, f"{{name}}={{value}}: {effect}", fix)
        for name, effect in effects.items()
    )


def matches(rules: Iterable[VariableRule], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the warning of each rule whose variable has such a value."""
    for rule in rules:
        value = variables.get(rule.name)
        if value is not None and rule.applies(value):
            message, fix = (
                text.format(name=rule.name, value=value) for text in (rule.message, rule.fix)
            )
            yield warn(message, {rule.name: value}, fix)


# --- the table -------------------------------------------------------------------------------------

# Variables that exist to find errors (CUDA Programming Guide, CUDA Environment Variables; of PyTorch and
# Numba, the pages on their variables).
DEBUGGING_RULES = _switches(
    {
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
)

# NCCL's variables for debugging (NCCL User Guide, Environment Variables), and names that PyTorch 2.2 changed.
NCCL_RULES = _switches(
    {
        "NCCL_P2P_DISABLE": "GPUs do not talk directly, over NVLink or PCIe, but through host memory",
        "NCCL_SHM_DISABLE": "GPUs without a direct path talk through the network instead of host memory",
        "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used; sockets are far slower",
        "NCCL_ALGO": "the algorithm is forced, whatever fits the size of the message",
        "NCCL_PROTO": "the protocol is forced, and a wrong one can corrupt data",
        "NCCL_NTHREADS": "the number of threads is forced",
        "NCCL_MAX_NCHANNELS": "bandwidth is limited by the number of channels",
        "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
    },
    fix="unset {name}, unless this machine was found to need it",
)
NCCL_RENAMED_RULES = tuple(
    VariableRule(
        name,
        lambda value: True,  # noqa: ARG005
        "PyTorch calls {name} TORCH_{name} since 2.2",
        "export TORCH_{name}={value}; unset {name}",
    )
    for name in (
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DESYNC_DEBUG",
        "NCCL_ENABLE_TIMING",
    )
)
# Settings that the machine may need: explained, and no finding.
_NCCL_OF_THE_MACHINE = {
    "NCCL_NVLS_ENABLE=0": "NVSwitch does no reductions (NVLink SHARP)",
    "NCCL_CUMEM_ENABLE=0": "buffers cannot be registered for NVLink",
    "NCCL_NET_GDR_LEVEL=LOC": "the network card does not reach GPU memory (GPUDirect RDMA)",
}

MATH_RULES = (
    *_switches(
        {
            "CUBLAS_LOGINFO_DBG": "cuBLAS writes a line for every call",
            "CUBLASLT_LOG_LEVEL": "cuBLASLt writes lines for every call",
            "CUBLASLT_LOG_MASK": "cuBLASLt writes lines for every call",
            "CUDNN_LOGINFO_DBG": "cuDNN writes lines for every call",
            "CUDNN_LOGLEVEL_DBG": "cuDNN writes lines for every call",
        }
    ),
    VariableRule(
        "NVIDIA_TF32_OVERRIDE",
        "0".__eq__,
        "{name}={value}: no library uses TF32, and float32 products are far slower",
    ),
    VariableRule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "1".__eq__,
        "{name}={value}: float32 products have the precision of TF32",
    ),
    VariableRule(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: not _WORKSPACE_FORM.fullmatch(value),
        "{name}={value} has not the form :KiB:count",
        "export {name}=:4096:8",
    ),
    VariableRule(
        "CUBLASLT_WORKSPACE_SIZE",
        lambda value: value.isdecimal() and int(value) < _LT_LEAST_KIB,
        "{name}={value} KiB is too little for cuBLASLt's fast kernels",
    ),
)

# Names of which a slight misspelling is reported; other unknown names are ignored.
_KNOWN = (
    *(rule.name for rule in DEBUGGING_RULES),
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
# Names that are close to one of the above, and valid.
_VALID = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DEBUG_FILE",
    "CUDA_INJECTION32_PATH",
)
_PREFIXES = ("CUDA", "NVIDIA_", "CUBLAS", "PYTORCH_", "NCCL_", "TORCH_")
# The similarity of two names of average length that differ in one letter.
_CLOSE = 0.93


# --- checks ----------------------------------------------------------------------------------------


def debugging(c: RunContext) -> Finding:
    """Some variables exist to find errors, and cost much speed when they are left set.

    CUDA_LAUNCH_BLOCKING=1 is the best known: every launch waits, so nothing overlaps. Others compile
    each kernel anew, switch PyTorch's memory cache off, or send Numba to the CPU.
    """
    return combine(
        matches(DEBUGGING_RULES, c.variables),
        otherwise=ok("no variable for finding errors slows CUDA down"),
    )


def allocator(c: RunContext) -> Finding:
    """PyTorch's allocator is set up by PYTORCH_ALLOC_CONF, and by its older name PYTORCH_CUDA_ALLOC_CONF.

    The form is key:value,key:value. A key that PyTorch does not know, or a value that a key cannot have,
    stops the program at its first use of CUDA; some of what is wrong PyTorch takes in silence, and does not
    follow as written. Keys are those of PyTorch 2.15; older versions refuse what is newer. Where
    both names are set, the one with CUDA in it wins, even if it is empty. With backend:cudaMallocAsync the
    keys of the native allocator do nothing.
    """
    given = {name: c.variables[name] for name in PYTORCH_VARIABLES if name in c.variables}
    if not any(given.values()):
        return ok("PyTorch's allocator has its default settings")
    name, value = next(iter(given.items()))
    problems = list(_invalid_settings(name, value))
    if len(set(given.values())) > 1:
        problems.append(
            warn(f"both {' and '.join(given)} are set; {name} wins", given, f"unset {name}")
        )
    return combine(
        problems, otherwise=ok(f"PyTorch's allocator is set up by {name}={value}", given)
    )


def _invalid_settings(name: str, text: str) -> Iterator[Finding]:
    try:
        parse_config(text, variable=name)
    except InputError as error:
        otherwise = f"export {name}=expandable_segments:True, or unset it"
        yield warn(error.message, {name: text}, *filter(None, [error.hint]), otherwise)


def nccl(c: RunContext) -> Finding:
    """NCCL's variables for debugging switch fast paths off, and are easily left behind in scripts.

    NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1 each take a way for data away;
    NCCL_DEBUG=INFO or TRACE writes much. NCCL reads /etc/nccl.conf as well, unless the environment says
    otherwise. Variables that belong to the machine are shown and not judged: names of interfaces
    (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), and what virtual machines may have to do without
    (NCCL_NVLS_ENABLE=0).
    """
    settings = {**c.software.nccl_conf, **c.variables}
    shown = {
        name: _explained(name, value)
        for name, value in settings.items()
        # NVIDIA's images name the version of NCCL that they contain.
        if name.startswith("NCCL_") and name != "NCCL_VERSION"
    }
    findings = (
        *matches(NCCL_RULES, settings),
        *_nccl_log(settings),
        *matches(NCCL_RENAMED_RULES, settings),
    )
    return combine(
        findings,
        otherwise=ok(f"NCCL is set up by {', '.join(sorted(shown))}", shown)
        if shown
        else ok("NCCL has its default settings"),
    )


def _explained(name: str, value: str) -> str:
    effect = _NCCL_OF_THE_MACHINE.get(f"{name}={value}")
    return f"{value}: {effect}" if effect else value


def _nccl_log(settings: Mapping[str, str]) -> Iterator[Finding]:
    level = settings.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn(
            f"NCCL_DEBUG={level} writes much to the output of every rank",
            {"NCCL_DEBUG": level},
            "export NCCL_DEBUG=WARN",
        )


def math_libraries(c: RunContext) -> Finding:
    """Variables of cuBLAS and cuDNN trade speed for precision, determinism or logs.

    NVIDIA_TF32_OVERRIDE=0 forbids TF32 everywhere: float32 products then do without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does the opposite, at less precision than a program may expect.
    CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 is what torch.use_deterministic_algorithms asks for; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small one forbids the fast kernels.
    """
    shown = {
        name: c.variables[name]
        for name in sorted(c.variables)
        if name.startswith(("CUBLAS", "CUDNN_")) or "TF32" in name
    }
    return combine(
        matches(MATH_RULES, c.variables),
        otherwise=ok(f"nothing in {', '.join(shown)} slows cuBLAS down", shown)
        if shown
        else ok("cuBLAS and cuDNN have their default settings"),
    )


def misspelt(c: RunContext) -> Finding:
    """A variable whose name is misspelt does nothing, and nobody says so.

    CUDA_VISIBLE_DEVICE=1 (without the S) hides no device. Names that are one letter away from a
    variable that CUDA, NCCL, cuBLAS or PyTorch reads are pointed out.
    """
    return combine(
        (
            warn(
                f"nothing reads {name}; {known} is the variable",
                {name: c.variables[name]},
                f"export {known}={c.variables[name]}; unset {name}",
            )
            for name in sorted(c.variables)
            for known in _similar(name)
        ),
        otherwise=ok("no variable's name is nearly that of another"),
    )


def _similar(name: str) -> list[str]:
    """Return the known name that a name is a misspelling of."""
    upper = name.upper()
    if name in (*_KNOWN, *_VALID) or not upper.startswith(_PREFIXES):
        return []
    return get_close_matches(upper, _KNOWN, n=1, cutoff=_CLOSE)
