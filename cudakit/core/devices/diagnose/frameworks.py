"""What the variables of PyTorch, NCCL and cuBLAS do to the programs that find them set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cudakit.core.devices.circumstances import Circumstances
from cudakit.core.devices.circumstances.files import Files
from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.core.devices.diagnose.settings import switched_on

# PyTorch takes the first of these that is set (c10/core/AllocatorConfig).
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The keys of PyTorch 2.0 to 2.15; a version refuses those that it does not know.
_KEYS = (
    "backend",
    "expandable_segments",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_bypass_threshold_mb",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
_SWITCHES = (
    "expandable_segments",
    "graph_capture_record_stream_reuse",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
# A comma outside of brackets: roundup_power2_divisions:[256:1,512:2] is one entry.
_BETWEEN = re.compile(r",(?![^\[]*\])")


def allocator_settings(c: Circumstances) -> Finding:
    """PyTorch's allocator is set up by PYTORCH_ALLOC_CONF, and by its older name PYTORCH_CUDA_ALLOC_CONF.

    The form is key:value,key:value. A key that PyTorch does not know stops the program at its first use
    of CUDA; a switch must be True or False, written so. Where both names are set, the one with CUDA in
    it wins. With backend:cudaMallocAsync the keys of the native allocator do nothing.
    """
    told = {name: c.environment[name] for name in _ALLOCATOR if c.environment.get(name)}
    if not told:
        return ok("PyTorch's allocator has its default settings")
    name, value = next(iter(told.items()))
    problems = list(_wrong_entries(name, value))
    if len(set(told.values())) > 1:
        problems.append(
            warn(f"both {' and '.join(told)} are set; {name} wins", told, f"unset {_ALLOCATOR[0]}")
        )
    return together(
        problems, otherwise=ok(f"PyTorch's allocator is set up by {name}={value}", told)
    )


def _wrong_entries(name: str, text: str) -> Iterator[Finding]:
    entries = dict(_entries(text))
    for key, value in entries.items():
        if key not in _KEYS:
            yield _wrong(name, text, f"PyTorch knows no key {key!r}, and refuses to start with it")
        elif key in _SWITCHES and value not in ("True", "False"):
            yield _wrong(name, text, f"{key} takes True or False, not {value!r}")
    if entries.get("backend") == "cudaMallocAsync" and len(entries) > 1:
        yield _wrong(name, text, "with backend:cudaMallocAsync the other keys do nothing")


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for entry in _BETWEEN.split(re.sub(r"\s", "", text)):
        key, _, value = entry.partition(":")
        if entry:
            yield key, value


def _wrong(name: str, text: str, why: str) -> Finding:
    return warn(
        f"{name}: {why}", {name: text}, f"export {name}=expandable_segments:True, or unset it"
    )


# --- NCCL ------------------------------------------------------------------------------------------

# What NCCL's manual lists for debugging, not to be left set (NCCL User Guide, Environment Variables).
_NCCL = {
    "NCCL_P2P_DISABLE": "GPUs do not talk directly, over NVLink or PCIe, but through host memory",
    "NCCL_SHM_DISABLE": "GPUs without a direct path talk through the network instead of host memory",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used; sockets are far slower",
    "NCCL_CHECKS_DISABLE": "arguments are not checked",
    "NCCL_ALGO": "the algorithm is forced, whatever fits the size of the message",
    "NCCL_PROTO": "the protocol is forced, and a wrong one can corrupt data",
    "NCCL_NTHREADS": "the number of threads is forced",
    "NCCL_MAX_NCHANNELS": "bandwidth is limited by the number of channels",
    "NCCL_TOPO_FILE": "the topology is read from a file, not from this machine",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
}
# Zero is what slows these down.
_NCCL_OFF = {
    "NCCL_NVLS_ENABLE": "NVSwitch does no reductions (NVLink SHARP)",
    "NCCL_CUMEM_ENABLE": "buffers cannot be registered for NVLink",
    "NCCL_NET_GDR_LEVEL": "the network card does not reach GPU memory (GPUDirect RDMA)",
}
# PyTorch 2.2 renamed what is its own.
_RENAMED = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
)


def nccl_settings(c: Circumstances) -> Finding:
    """NCCL's variables for debugging switch fast paths off, and are easily left behind in scripts.

    NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1 each take a way for data away;
    NCCL_DEBUG=INFO or TRACE writes much. NCCL reads /etc/nccl.conf as well, unless the environment says
    otherwise. Variables that name interfaces (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) belong to the machine,
    and are only shown.
    """
    settings = {**_conf(c.files), **c.environment}
    told = {name: value for name, value in settings.items() if name.startswith("NCCL_")}
    return together(
        _nccl_findings(settings),
        otherwise=ok(f"nothing in {', '.join(sorted(told))} slows NCCL down", told)
        if told
        else ok("NCCL has its default settings"),
    )


def _nccl_findings(settings: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in switched_on(settings, _NCCL):
        yield warn(f"{name}={value}: {_NCCL[name]}", {name: value}, f"unset {name}")
    for name, what in _NCCL_OFF.items():
        if settings.get(name) in ("0", "LOC"):
            yield warn(f"{name}={settings[name]}: {what}", {name: settings[name]}, f"unset {name}")
    level = settings.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn(
            f"NCCL_DEBUG={level} writes much to the output of every rank",
            {"NCCL_DEBUG": level},
            "export NCCL_DEBUG=WARN",
        )
    for name in _RENAMED:
        if name in settings:
            yield warn(
                f"PyTorch calls {name} TORCH_{name} since 2.2",
                {name: settings[name]},
                f"export TORCH_{name}={settings[name]}; unset {name}",
            )


def _conf(files: Files) -> dict[str, str]:
    """Read /etc/nccl.conf: NAME=value on each line."""
    lines = (files.text("/etc/nccl.conf") or "").splitlines()
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


# --- cuBLAS ----------------------------------------------------------------------------------------

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


def math_settings(c: Circumstances) -> Finding:
    """cuBLAS and cuDNN have variables that trade speed for precision, determinism or logs.

    NVIDIA_TF32_OVERRIDE=0 forbids TF32 everywhere: float32 products then do without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does the opposite, at less precision than a program may expect.
    CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 is what torch.use_deterministic_algorithms asks for; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small one forbids the fast kernels.
    """
    told = {name: c.environment[name] for name in _math_names(c.environment)}
    return together(
        _math_findings(c.environment),
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
