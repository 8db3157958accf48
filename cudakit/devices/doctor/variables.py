"""Checks of environment variables (CK020 to CK024), driven by the table of variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from cudakit.devices.doctor.check import (
    Finding,
    SetVariable,
    combine_findings,
    ok_finding,
    warn_finding,
)
from cudakit.errors import InputError
from cudakit.gpu.api.facts import RunContext
from cudakit.torch_rules.settings import PYTORCH_VARIABLES, VARIABLES, parse_config

# --- The environment variables that change CUDA, its libraries, its Python frameworks or cudakit ---
#
# A heading names the library that reads the variables below it and their source: a section of the library's
# documentation, or a source file. The mark ``!CK020`` makes that check report the variable unless it is off.
# An effect after ``1:`` is that of a switch: it does not apply if the variable is off.

_ROW_PATTERN = re.compile(r"(\w+)(?: !(CK\d+))? (.+)")


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table: an environment variable and its effect."""

    name: str
    library: str  # library that reads the variable, such as "CUDA", "PyTorch" or "NCCL"
    effect: str
    source: str  # section of the documentation, or source file
    check: str  # id of the check that warns about the variable unless it is off; empty if there is none


@cache
def known_variables() -> Mapping[str, Variable]:
    """Return all rows of the table by the name of the variable."""
    variables = {}
    library = source = ""
    for line in _TABLE.strip().splitlines():
        if line.startswith("["):
            library, _, source = line.strip("[]").partition(" | ")
        elif line:
            row_match = _ROW_PATTERN.fullmatch(line)
            assert row_match, line  # noqa: S101 the table is a constant
            name, check, effect = row_match.groups(default="")
            variables[name] = Variable(name, library, effect, source, check)
    return variables


_TABLE = """
[CUDA | CUDA Programming Guide, CUDA Environment Variables]
CUDA_VISIBLE_DEVICES the devices that CUDA programs see, by index or UUID, in this order
CUDA_DEVICE_ORDER FASTEST_FIRST (default) or PCI_BUS_ID: how CUDA numbers the devices
CUDA_MANAGED_FORCE_DEVICE_ALLOC 1: managed memory is always on a GPU; all GPUs in use need peer access
CUDA_CACHE_DISABLE !CK020 kernels compiled from PTX are not cached: every process compiles them again
CUDA_CACHE_PATH directory of the cache of kernels compiled from PTX
CUDA_CACHE_MAXSIZE size limit in bytes of the cache of kernels compiled from PTX
CUDA_FORCE_PTX_JIT !CK020 machine code is ignored: every kernel is compiled from PTX at start
CUDA_FORCE_JIT !CK020 machine code is ignored: every kernel is compiled from PTX at start
CUDA_DISABLE_PTX_JIT !CK020 kernels that exist only as PTX fail to load
CUDA_DISABLE_JIT !CK020 kernels that exist only as PTX fail to load
CUDA_FORCE_PRELOAD_LIBRARIES 1: the PTX and NVVM compiler libraries are loaded when the driver starts
CUDA_LAUNCH_BLOCKING !CK020 every kernel launch waits until the kernel has finished
CUDA_DEVICE_MAX_CONNECTIONS number of hardware queues for kernels and copies (default 8)
CUDA_DEVICE_MAX_COPY_CONNECTIONS number of hardware queues for copies (default 8)
CUDA_SCALE_LAUNCH_QUEUES size of the launch queue relative to the default: 0.25x to 4x
CUDA_AUTO_BOOST automatic clock boost on or off (deprecated)
CUDA_MODULE_LOADING LAZY (default) or EAGER: when kernels are loaded onto the GPU
CUDA_MODULE_DATA_LOADING LAZY or EAGER: when data of modules is loaded onto the GPU
CUDA_BINARY_LOADER_THREAD_COUNT number of CPU threads that load device code
CUDA_GRAPHS_USE_NODE_PRIORITY 1: graph nodes run with their own priorities, not with that of the launch stream
CUDA_DEVICE_WAITS_ON_EXCEPTION !CK020 the GPU halts at an error and waits for a debugger
CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT share of L2 set aside under MPS
CUDA_DISABLE_PERF_BOOST 1: the driver does not raise the clocks while CUDA runs
CUDA_LOG_FILE file for the driver's error log messages

[CUDA | cuda.h, CUDA_ERROR_FABRIC_NOT_READY]
CUDA_FABRIC_INIT_TIMEOUT_MS time that the driver waits for the GPU fabric (NVSwitch) at start

[CUDA | CUDA-GDB, GPU core dump support]
CUDA_ENABLE_COREDUMP_ON_EXCEPTION !CK020 a GPU error writes the GPU's memory to a file
CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION 1: a GPU error also writes a core dump of the process
CUDA_ENABLE_LIGHTWEIGHT_COREDUMP 1: GPU core dumps leave out memory contents (until CUDA 12)
CUDA_ENABLE_USER_TRIGGERED_COREDUMP 1: writing to a pipe triggers a GPU core dump
CUDA_COREDUMP_FILE file name of GPU core dumps
CUDA_COREDUMP_PIPE name of the pipe that triggers a GPU core dump
CUDA_COREDUMP_SHOW_PROGRESS 1: the progress of a GPU core dump is printed on stderr
CUDA_COREDUMP_GENERATION_FLAGS contents to leave out of GPU core dumps

[CUDA | CUDA Multi-Process Service, Environment Variables]
CUDA_MPS_PIPE_DIRECTORY directory of the pipes to the MPS daemon
CUDA_MPS_LOG_DIRECTORY directory of the logs of the MPS daemon
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE share of the SMs that this MPS client may use
CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING 1: the share of SMs is set per context
CUDA_MPS_PINNED_DEVICE_MEM_LIMIT limit on device memory per MPS client
CUDA_MPS_CLIENT_PRIORITY priority of this MPS client: 0 is normal, 1 is below normal

[CUDA | CUPTI User's Guide; NVTX documentation]
CUDA_INJECTION64_PATH !CK025 the driver loads this tool into every CUDA program
CUDA_INJECTION32_PATH !CK025 the driver loads this tool into every 32-bit CUDA program
NVTX_INJECTION64_PATH !CK025 NVTX ranges go to this tool
NVTX_INJECTION32_PATH !CK025 NVTX ranges of 32-bit programs go to this tool

[CUDA toolkit | torch/utils/cpp_extension.py; CuPy documentation, Environment variables]
CUDA_HOME directory of the CUDA toolkit
CUDA_PATH directory of the CUDA toolkit

[CUDA toolkit | nvcc documentation, NVCC Environment Variables]
NVCC_PREPEND_FLAGS options that nvcc puts before its own
NVCC_APPEND_FLAGS options that nvcc puts after its own
NVCC_CCBIN host compiler of nvcc

[CUDA toolkit | jax/_src/lib/__init__.py]
CUDA_ROOT directory of the CUDA toolkit, for JAX

[Container | NVIDIA CUDA container images]
CUDA_VERSION CUDA version of the container image; information only

[Container | NVIDIA Container Toolkit, Specialized Configurations with Docker]
NVIDIA_VISIBLE_DEVICES GPUs that the container gets; read when it starts
NVIDIA_DRIVER_CAPABILITIES driver libraries that the container gets: compute, utility, graphics, video
NVIDIA_REQUIRE_CUDA CUDA version that the container image needs from the driver
NVIDIA_DISABLE_REQUIRE 1: the version requirements of the container image are ignored
NVIDIA_MIG_CONFIG_DEVICES MIG devices that the container may configure
NVIDIA_MIG_MONITOR_DEVICES MIG devices that the container may monitor

[cuBLAS | cuBLAS documentation, sections Results Reproducibility, Logging and Floating Point Emulation]
CUBLAS_WORKSPACE_CONFIG workspace sizes; :4096:8 or :16:8 makes results deterministic
CUBLAS_LOGINFO_DBG !CK023 cuBLAS writes a log line for every call
CUBLAS_LOGDEST_DBG destination of cuBLAS's log
CUBLASLT_LOG_LEVEL !CK023 cuBLASLt writes log lines: 1 for errors only, 5 for every call
CUBLASLT_LOG_MASK !CK023 cuBLASLt writes log lines of the selected kinds; 16 is every call
CUBLASLT_LOG_FILE file of cuBLASLt's log
CUBLASLT_HEURISTICS_CACHE_CAPACITY number of cached algorithm choices
CUBLAS_EMULATE_SINGLE_PRECISION 1: float32 GEMMs are computed with BF16 tensor cores
CUBLAS_EMULATE_DOUBLE_PRECISION 1: float64 GEMMs are computed with integer tensor cores
CUBLAS_EMULATION_STRATEGY when cuBLAS uses floating-point emulation: performant or eager
CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT number of mantissa bits of emulated float64 GEMMs

[cuBLAS | NVIDIA blog, Accelerating AI Training with TF32 Tensor Cores]
NVIDIA_TF32_OVERRIDE 0 disables TF32 in all NVIDIA libraries

[cuDNN | cuDNN documentation, Error Reporting and API Logging]
CUDNN_LOGINFO_DBG !CK023 cuDNN writes log lines for every call (deprecated)
CUDNN_LOGLEVEL_DBG !CK023 cuDNN writes log lines: 1 for errors only, 3 for every call
CUDNN_LOGWARN_DBG 1: cuDNN logs warnings (deprecated)
CUDNN_LOGERR_DBG 1: cuDNN logs errors (deprecated)
CUDNN_LOGDEST_DBG destination of cuDNN's log

[cuDNN | cuDNN frontend documentation, Debugging]
CUDNN_FRONTEND_LOG_INFO !CK023 the cuDNN frontend logs every call
CUDNN_FRONTEND_LOG_FILE file of the cuDNN frontend's log

[cuDNN | PyTorch documentation, CUDA Environment Variables]
CUDNN_CONV_WSCAP_DBG limit in MiB on the workspace of convolutions
CUDNN_ERRATA_JSON_FILE rules that exclude cuDNN engines

[PyTorch | PyTorch documentation, CUDA Environment Variables]
PYTORCH_NO_CUDA_MEMORY_CACHING !CK020 every allocation calls cudaMalloc, and every free cudaFree
PYTORCH_CUDA_ALLOC_CONF older name of PYTORCH_ALLOC_CONF; if both are set, this one applies
PYTORCH_NVML_BASED_CUDA_CHECK 1: is_available() asks NVML, so that a process can still fork afterwards
TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT number of cached cuDNN execution plans
TORCH_CUDNN_V8_API_DISABLED 1: the older cuDNN API is used
TORCH_CUDNN_V8_API_DEBUG 1: PyTorch warns which cuDNN API its convolutions use
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE 1 makes float32 GEMMs use TF32
TORCH_CUBLAS_WORKSPACE_CACHE 1: cuBLAS workspaces are kept per handle and stream
CUBLASLT_WORKSPACE_SIZE workspace of cuBLASLt in KiB

[PyTorch | c10/core/AllocatorConfig.h]
PYTORCH_ALLOC_CONF settings of the caching allocator; PyTorch 2.9 and older read only PYTORCH_CUDA_ALLOC_CONF

[PyTorch | c10/cuda/CUDACachingAllocator.cpp]
TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC 0: expandable segments cannot be shared between processes

[PyTorch | c10/cuda/CUDADeviceAssertionHost.cpp]
PYTORCH_USE_CUDA_DSA 1: device-side assertions report the failing kernel launch
PYTORCH_CUDA_DSA_STACKTRACING !CK020 with PYTORCH_USE_CUDA_DSA: every kernel launch records a stack trace

[PyTorch | aten/src/ATen/Context.h]
TORCH_BLAS_PREFER_CUBLASLT 1: GEMMs use cuBLASLt instead of cuBLAS
TORCH_LINALG_PREFER_CUSOLVER 1: linear algebra uses cuSOLVER

[PyTorch | aten/src/ATen/native/ConvUtils.h]
TORCH_CUDNN_USE_HEURISTIC_MODE_B 1: cuDNN chooses convolution algorithms with its heuristic mode B

[PyTorch | torch/backends/cudnn/__init__.py]
PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK 1: the version of cuDNN is not checked

[PyTorch | torch/cuda/__init__.py]
TORCH_CUDA_CHECK_STRAY_CONTEXT warn or error, if the process has a CUDA context on another device

[PyTorch | aten/src/ATen/cuda/CublasHandlePool.cpp]
TORCH_CUBLASLT_UNIFIED_WORKSPACE 1: cuBLASLt shares the workspace of cuBLAS (if it is cached)

[PyTorch | aten/src/ATen/native/cuda/jit_utils.cpp]
USE_PYTORCH_KERNEL_CACHE 0 disables the cache of kernels compiled at run time
PYTORCH_KERNEL_CACHE_PATH directory of the cache of kernels compiled at run time

[PyTorch | aten/src/ATen/cuda/tunable/README.md]
PYTORCH_TUNABLEOP_ENABLED 1: GEMMs use the fastest algorithm that was measured
PYTORCH_TUNABLEOP_TUNING 1: GEMMs without a measurement are measured
PYTORCH_TUNABLEOP_FILENAME file of the measured algorithms
PYTORCH_TUNABLEOP_VERBOSE 1: TunableOp writes a log
PYTORCH_TUNABLEOP_NUMERICAL_CHECK 1: results of tuned GEMMs are compared with the default
PYTORCH_TUNABLEOP_RECORD_UNTUNED 1: GEMMs without a measurement are written to a file
PYTORCH_TUNABLEOP_UNTUNED_FILENAME file of the GEMMs without a measurement
PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS time limit for measuring one algorithm
PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS iteration limit for measuring one algorithm
PYTORCH_TUNABLEOP_MAX_WARMUP_DURATION_MS time limit for the warm-up
PYTORCH_TUNABLEOP_MAX_WARMUP_ITERATIONS iteration limit for the warm-up
PYTORCH_TUNABLEOP_ICACHE_FLUSH_ENABLED 1: the instruction cache is flushed between measurements
PYTORCH_TUNABLEOP_ROTATING_BUFFER_SIZE size of the rotated buffers in MiB

[PyTorch | torch/utils/cpp_extension.py]
TORCH_CUDA_ARCH_LIST compute capabilities that extensions are compiled for
TORCH_EXTENSIONS_DIR directory of compiled extensions
MAX_JOBS number of parallel compiler processes for extensions

[PyTorch | torch/cuda/_sanitizer.py]
TORCH_CUDA_SANITIZER !CK020 PyTorch's CUDA sanitizer checks every operation for races

[PyTorch | torch/_inductor/runtime/cache_dir_utils.py]
TORCHINDUCTOR_CACHE_DIR directory of the cache of torch.compile

[PyTorch | torch/compiler/config.py]
TORCHINDUCTOR_FORCE_DISABLE_CACHES !CK020 torch.compile compiles everything again

[PyTorch | torch/_dynamo/config.py]
TORCH_COMPILE_DISABLE !CK020 torch.compile compiles nothing

[PyTorch | torch/_inductor/config.py]
TORCHINDUCTOR_FX_GRAPH_CACHE cache of compiled graphs on or off
TORCHINDUCTOR_MAX_AUTOTUNE 1: torch.compile measures several kernels and takes the fastest
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM 1: torch.compile measures several kernels for GEMMs only
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS kernel sources for GEMMs: ATEN, TRITON, CUTLASS, CUTEDSL, NVGEMM, CPP
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_SEARCH_SPACE DEFAULT or EXHAUSTIVE: number of GEMM kernels to measure
TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE 1: torch.compile measures several pointwise and reduction kernels
TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC 1: kernels are measured in another process
TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE remote cache of measured kernel parameters on or off
TORCHINDUCTOR_COORDINATE_DESCENT_TUNING 1: torch.compile searches the parameters of Triton kernels
TORCHINDUCTOR_COMPILE_THREADS number of processes that compile kernels
TORCHINDUCTOR_CUDAGRAPHS 1: compiled code runs as CUDA graphs
TORCHINDUCTOR_CUDAGRAPH_OR_ERROR 1: an error is raised if part of a graph cannot run as a CUDA graph
TORCHINDUCTOR_CPP_WRAPPER 1: compiled code calls its kernels from C++ instead of Python
TORCHINDUCTOR_DETERMINISTIC 1: torch.compile chooses no kernel by measured time if results depend on it
TORCHINDUCTOR_BATCH_INVARIANT 1: results do not depend on the batch size; implies TORCHINDUCTOR_DETERMINISTIC
TORCHINDUCTOR_USE_FAST_MATH 1: Triton kernels use a faster exponential that flushes denormals to 0
TORCHINDUCTOR_NAN_ASSERTS !CK020 compiled code checks its tensors for NaN
TORCHINDUCTOR_SIZE_ASSERTS 0: compiled code does not check tensor sizes
TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER 1: kernels are launched without Triton's launcher
TORCHINDUCTOR_ENABLE_PDL 1: kernels use programmatic dependent launch
ENABLE_PERSISTENT_TMA_MATMUL 1: GEMM templates include persistent TMA kernels
TORCHINDUCTOR_MULTI_KERNEL 1: several variants of a reduction kernel are measured at run time
TORCHINDUCTOR_SKIP_L1 1: loads of buffers that are used once bypass the L1 cache
TORCHINDUCTOR_BENCHMARK_KERNEL 1: generated code includes a benchmark of each kernel
TORCHINDUCTOR_PROFILE bandwidth of kernels is measured and printed: 1 for all, else a pattern of names
TORCHINDUCTOR_CUTLASS_DIR directory of CUTLASS

[PyTorch | third_party/kineto/libkineto]
KINETO_LOG_LEVEL log level of the profiler
KINETO_CONFIG configuration file of the profiler
KINETO_USE_DAEMON any value, even 0: the profiler listens to a daemon (dynolog)
TEARDOWN_CUPTI 1: the profiler releases CUPTI after each use
DISABLE_CUPTI_LAZY_REINIT any value, even 0: CUPTI stays attached between profiles

[PyTorch | torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp]
TORCH_NCCL_ASYNC_ERROR_HANDLING what happens after a failed or timed-out collective
TORCH_NCCL_HIGH_PRIORITY 1: collectives run on high-priority streams
TORCH_NCCL_BLOCKING_WAIT !CK022 the host waits for every collective
TORCH_NCCL_DUMP_ON_TIMEOUT 1: a timeout writes the recorded collectives to files
TORCH_NCCL_DESYNC_DEBUG 1: a timeout reports the ranks that are out of step
TORCH_NCCL_ENABLE_TIMING !CK022 every collective records start events
TORCH_NCCL_ENABLE_MONITORING 1: a thread ends the process if NCCL hangs
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC seconds without progress after which PyTorch ends the process
TORCH_NCCL_TRACE_BUFFER_SIZE older name of TORCH_FR_BUFFER_SIZE
TORCH_NCCL_TRACE_CPP_STACK older name of TORCH_FR_CPP_STACK
TORCH_NCCL_COORD_CHECK_MILSEC interval of checks for timeouts on other ranks
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC time to write the dump after a timeout
TORCH_NCCL_DEBUG_INFO_TEMP_FILE file prefix of the flight recorder's dumps
TORCH_NCCL_DEBUG_INFO_PIPE_FILE pipe that triggers a dump
TORCH_NCCL_NAN_CHECK !CK022 inputs of every collective are checked for NaN
TORCH_NCCL_AVOID_RECORD_STREAMS 1: tensors of collectives are kept alive without record_stream (older PyTorch)
TORCH_NCCL_USE_COMM_NONBLOCKING 1: communicators are created without blocking
TORCH_NCCL_NONBLOCKING_TIMEOUT timeout of nonblocking communicators
TORCH_NCCL_CUDA_EVENT_CACHE 1: CUDA events of collectives are reused
TORCH_NCCL_RETHROW_CUDA_ERRORS 1: CUDA errors of the watchdog thread are raised
TORCH_NCCL_PROPAGATE_ERROR 1: errors are sent to the other ranks
TORCH_NCCL_TEARDOWN_ON_TIMEOUT 1: a timeout ends the process
TORCH_NCCL_RANKS_PER_ROOT number of ranks per root when a communicator is created
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK 1: allocated tensors are registered with NCCL
TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN 1: C++ stacks are logged when a process ends abnormally

[PyTorch | torch/csrc/distributed/c10d/FlightRecorder.hpp]
TORCH_FR_BUFFER_SIZE number of collectives in the flight recorder
TORCH_FR_CPP_STACK 1: the flight recorder includes C++ stacks
TORCH_FR_DUMP_ON_TIMEOUT 1: a timeout writes the recorded collectives to files
TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC time limit for writing the recorded collectives
TORCH_INCLUDE_STACK_TRACE 0: the flight recorder's dumps leave out stacks
TORCH_INCLUDE_ONLY_ACTIVE 1: the flight recorder's dumps list unfinished collectives only

[PyTorch | PyTorch documentation, torch.distributed, Debugging]
TORCH_DISTRIBUTED_DEBUG OFF, INFO or DETAIL: DETAIL checks every collective

[PyTorch | torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, deprecated names]
NCCL_BLOCKING_WAIT former name of TORCH_NCCL_BLOCKING_WAIT
NCCL_ASYNC_ERROR_HANDLING former name of TORCH_NCCL_ASYNC_ERROR_HANDLING
NCCL_DESYNC_DEBUG former name of TORCH_NCCL_DESYNC_DEBUG
NCCL_ENABLE_TIMING former name of TORCH_NCCL_ENABLE_TIMING

[NCCL | NCCL User Guide, Environment Variables, System configuration]
NCCL_SOCKET_IFNAME network interfaces for sockets
NCCL_SOCKET_FAMILY IPv4 (AF_INET) or IPv6 (AF_INET6)
NCCL_SOCKET_RETRY_CNT number of retries of a connection
NCCL_SOCKET_RETRY_SLEEP_MSEC time between retries of a connection
NCCL_SOCKET_NTHREADS number of threads per socket connection
NCCL_NSOCKS_PERTHREAD number of sockets per thread
NCCL_CROSS_NIC whether rings may use different network cards on different nodes
NCCL_IB_HCA InfiniBand and RoCE adapters to use
NCCL_IB_TIMEOUT InfiniBand timeout
NCCL_IB_RETRY_CNT number of InfiniBand retries
NCCL_IB_GID_INDEX RoCE GID index
NCCL_IB_ADDR_FAMILY address family of RoCE GIDs
NCCL_IB_ADDR_RANGE address range of RoCE GIDs
NCCL_IB_ROCE_VERSION_NUM RoCE version
NCCL_IB_SL InfiniBand service level
NCCL_IB_TC InfiniBand traffic class
NCCL_IB_FIFO_TC traffic class of control messages
NCCL_IB_RETURN_ASYNC_EVENTS whether InfiniBand errors stop NCCL
NCCL_OOB_NET_ENABLE 1: ranks bootstrap over the network plugin instead of sockets
NCCL_OOB_NET_IFNAME network interfaces for the bootstrap of NCCL_OOB_NET_ENABLE
NCCL_UID_STAGGER_THRESHOLD number of ranks from which bootstrap connections are staggered
NCCL_UID_STAGGER_RATE bootstrap connections per second
NCCL_NET network module: Socket, IB or a plugin
NCCL_NET_PLUGIN network plugin library
NCCL_TUNER_PLUGIN plugin that chooses algorithms and protocols
NCCL_PROFILER_PLUGIN profiler plugin library
NCCL_IGNORE_CPU_AFFINITY 1: NCCL ignores the CPU affinity of the process
NCCL_CONF_FILE configuration file
NCCL_DEBUG log level: VERSION, WARN, INFO or TRACE
NCCL_DEBUG_FILE file of the log
NCCL_DEBUG_SUBSYS parts of NCCL that write to the log
NCCL_DEBUG_TIMESTAMP_FORMAT time format of the log
NCCL_DEBUG_TIMESTAMP_LEVELS log levels with times
NCCL_COLLNET_ENABLE 1: reductions run in the network (SHARP)
NCCL_COLLNET_NODE_THRESHOLD number of nodes from which SHARP is used
NCCL_CTA_POLICY policy for the number of thread blocks
NCCL_TOPO_FILE file with the hardware topology
NCCL_TOPO_DUMP_FILE file that the detected topology is written to
NCCL_SET_THREAD_NAME 1: NCCL's CPU threads get names

[NCCL | NCCL User Guide, Environment Variables, Debugging]
NCCL_P2P_DISABLE !CK022 no direct access between GPUs: NCCL uses host memory or the network
NCCL_P2P_LEVEL longest path between GPUs for direct transfers
NCCL_P2P_DIRECT_DISABLE !CK022 GPUs of one process do not access each other's memory directly
NCCL_SHM_DISABLE !CK022 GPUs without a direct path use the network instead of host memory
NCCL_BUFFSIZE size of the buffers between two GPUs
NCCL_NTHREADS !CK022 the number of threads per block is fixed
NCCL_MAX_NCHANNELS !CK022 the number of channels, and so the bandwidth, is limited
NCCL_MIN_NCHANNELS lower limit on channels
NCCL_MAX_CTAS upper limit on thread blocks
NCCL_MIN_CTAS lower limit on thread blocks
NCCL_CHECKS_DISABLE no longer read: pointer checks are off unless NCCL_CHECK_MODE enables them
NCCL_CHECK_POINTERS !CK022 device pointers of every call are checked (deprecated)
NCCL_LAUNCH_MODE PARALLEL or GROUP: how kernels are launched
NCCL_IB_DISABLE !CK022 InfiniBand and RoCE are not used; sockets are far slower
NCCL_IB_AR_THRESHOLD message size from which adaptive routing is used
NCCL_IB_QPS_PER_CONNECTION number of queue pairs per connection
NCCL_IB_SPLIT_DATA_ON_QPS 1: data is split over the queue pairs
NCCL_IB_CUDA_SUPPORT no longer read: GPUDirect RDMA on or off; use NCCL_NET_GDR_LEVEL
NCCL_IB_PCI_RELAXED_ORDERING PCIe relaxed ordering for InfiniBand: 0 off, 1 on, 2 if it is supported
NCCL_IB_ADAPTIVE_ROUTING InfiniBand adaptive routing on or off
NCCL_IB_ECE_ENABLE InfiniBand enhanced connection establishment on or off
NCCL_IB_MERGE_NICS 1: ports of one adapter are used as one device
NCCL_MEM_SYNC_DOMAIN memory synchronization domain of NCCL's kernels
NCCL_CUMEM_ENABLE 0 disables cuMem allocations, and with them buffer registration over NVLink
NCCL_CUMEM_HOST_ENABLE 1: host buffers use cuMem allocations
NCCL_NET_GDR_LEVEL longest path between GPU and network card for GPUDirect RDMA
NCCL_NET_GDR_C2C GPUDirect RDMA over NVLink-C2C on or off
NCCL_NET_GDR_READ GPUDirect RDMA for sending on or off
NCCL_NET_SHARED_BUFFERS 1: network buffers are shared between peers
NCCL_NET_SHARED_COMMS 1: network connections are shared
NCCL_ALGO !CK022 the algorithm is fixed for every message size
NCCL_PROTO !CK022 the protocol is fixed; an unsuitable one can corrupt data
NCCL_NVB_DISABLE 1: transfers over an intermediate GPU are disabled
NCCL_PXN_DISABLE 1: transfers over another GPU's network card are disabled
NCCL_P2P_PXN_LEVEL when send and receive use another GPU's network card
NCCL_RUNTIME_CONNECT 1: connections are made at their first use
NCCL_GRAPH_REGISTER 1: buffers of CUDA graphs are registered
NCCL_LOCAL_REGISTER 1: buffers are registered on request
NCCL_WIN_ENABLE window registration on or off
NCCL_DMABUF_ENABLE GPUDirect RDMA through Linux dma-buf on or off
NCCL_COMM_BLOCKING 1: calls block until they are complete
NCCL_CGA_CLUSTER_SIZE cluster size of NCCL's kernels
NCCL_NCHANNELS_PER_NET_PEER number of channels per network peer
NCCL_NVLS_ENABLE reductions in the NVSwitch (NVLink SHARP): 0 off, 1 on, 2 if it is supported
NCCL_NVLS_NCHANNELS number of channels for NVLink SHARP
NCCL_MNNVL_ENABLE NVLink between nodes: 0 off, 1 on, 2 if it is supported
NCCL_RAS_ENABLE monitoring of jobs (RAS) on or off
NCCL_RAS_ADDR address of the RAS service
NCCL_RAS_TIMEOUT_FACTOR factor on the timeouts of RAS
NCCL_LAUNCH_ORDER_IMPLICIT 1: kernels of several communicators are ordered
NCCL_LAUNCH_RACE_FATAL 1: launches from several threads at once are errors
NCCL_IPC_USE_ABSTRACT_SOCKET abstract Unix sockets between processes on or off
NCCL_NVTX_DISABLE 1: NCCL writes no NVTX ranges

[NCCL | NCCL source code]
NCCL_CHECK_MODE !CK022 DEBUG_LOCAL or DEBUG_GLOBAL: every call is checked
NCCL_COMM_ID address of the root for starting without a unique id from the program
NCCL_HOSTID name that identifies the node
NCCL_NETDEVS_POLICY AUTO, ALL or MAX:N: number of network devices per GPU
NCCL_NET_DISABLE_INTRA 1: GPUs of one node do not use the network between them
NCCL_NET_FORCE_FLUSH 1: received data is always flushed after GPUDirect RDMA
NCCL_COMM_SPLIT_SHARE_RESOURCES 1: communicators from a split share the resources of their parent
NCCL_COMM_SHRINK_SHARE_RESOURCES 1: communicators from a shrink share the resources of their parent
NCCL_GRAPH_MIXING_SUPPORT 0: faster launches, if captured and other calls do not overlap
NCCL_GRAPH_FILE file with the rings and trees to use
NCCL_GRAPH_DUMP_FILE file that the chosen rings and trees are written to
NCCL_P2P_NET_CHUNKSIZE chunk size of send and receive over the network
NCCL_P2P_USE_CUDA_MEMCPY !CK022 copies between GPUs use the copy engines instead of kernels
NCCL_MIN_P2P_NCHANNELS lower limit on channels for send and receive
NCCL_MAX_P2P_NCHANNELS upper limit on channels for send and receive
NCCL_LL_BUFFSIZE size of the buffers of the protocol LL
NCCL_LL128_BUFFSIZE size of the buffers of the protocol LL128
NCCL_NVLS_CHUNKSIZE chunk size of NVLink SHARP
NCCL_PAT_ENABLE the algorithm PAT on or off
NCCL_SYM_CTAS number of thread blocks of kernels for symmetric memory
NCCL_GIN_ENABLE network transfers that kernels start (GIN) on or off
NCCL_IB_PKEY InfiniBand partition key index
NCCL_IB_DATA_DIRECT Data Direct of ConnectX adapters on or off
NCCL_GDRCOPY_ENABLE GDRCopy for small transfers between CPU and GPU on or off
NCCL_MNNVL_UUID NVLink domain of this node, in place of the detected one
NCCL_MNNVL_CLIQUE_ID NVLink clique of this node, in place of the detected one
NCCL_MULTI_RANK_GPU_ENABLE 1: several ranks may use one GPU
NCCL_PROXY_CPUSET CPU cores of the proxy threads
NCCL_ENV_PLUGIN plugin that supplies environment variables

[Triton | python/triton/knobs.py]
TRITON_HOME parent directory of Triton's caches
TRITON_CACHE_DIR directory of compiled kernels
TRITON_ALWAYS_COMPILE !CK020 kernels are compiled again in every process
TRITON_INTERPRET !CK020 kernels run on the CPU in Triton's interpreter
TRITON_DEBUG !CK020 kernels are compiled with device assertions
TRITON_KERNEL_DUMP 1: intermediate code of every kernel is written to files
TRITON_DUMP_DIR directory of the intermediate code
TRITON_KERNEL_OVERRIDE 1: intermediate code from files replaces the compiler's
TRITON_OVERRIDE_DIR directory of the intermediate code that TRITON_KERNEL_OVERRIDE uses
TRITON_PRINT_AUTOTUNING 1: results of autotuning are printed
TRITON_CACHE_AUTOTUNING 1: results of autotuning are cached
TRITON_DISABLE_LINE_INFO 1: kernels have no source line information
TRITON_F32_DEFAULT default precision of float32 tl.dot: ieee, tf32 or tf32x3
TRITON_DEFAULT_FP_FUSION 0: multiplications and additions are not fused
TRITON_OVERRIDE_ARCH architecture that kernels are compiled for
TRITON_INSTRUMENTATION_MODE !CK020 kernels are compiled with a sanitizer
TRITON_ALLOW_NON_CONSTEXPR_GLOBALS 1: kernels may read global variables that are not constexpr
TRITON_STORE_BINARY_ONLY 1: the cache keeps machine code only
TRITON_FRONT_END_DEBUGGING 1: errors of the front end show the compiler's stack
TRITON_PTXAS_PATH ptxas to use
TRITON_PTXAS_BLACKWELL_PATH ptxas to use for Blackwell
TRITON_CUOBJDUMP_PATH cuobjdump to use
TRITON_NVDISASM_PATH nvdisasm to use
TRITON_LIBCUDA_PATH directory of libcuda
TRITON_LIBDEVICE_PATH libdevice to use
NVPTX_ENABLE_DUMP 1: PTX is printed
DISABLE_PTXAS_OPT !CK020 ptxas does not optimize
PTXAS_OPTIONS additional options of ptxas
TRITON_DUMP_PTXAS_LOG 1: log of ptxas is printed
TRITON_CACHE_MANAGER class of the cache of compiled kernels
TRITON_REMOTE_CACHE_BACKEND class of the remote cache of compiled kernels

[Triton | Triton repository, README.md]
TRITON_REPRODUCER_PATH file for a reproducer of a compiler error
MLIR_ENABLE_DUMP 1: intermediate code of every compiler pass is printed
LLVM_IR_ENABLE_DUMP 1: LLVM code of every compiler pass is printed
USE_IR_LOC line information refers to the intermediate code: ttir or ttgir
DISABLE_LLVM_OPT !CK020 LLVM does not optimize, or without the named optimizations
TRITON_ENABLE_LLVM_DEBUG 1: debug output of LLVM is printed
TRITON_LLVM_DEBUG_ONLY LLVM passes whose debug output is printed
MLIR_ENABLE_TIMING 1: time of every MLIR pass is printed
LLVM_ENABLE_TIMING 1: time of every LLVM pass is printed

[JAX | JAX documentation, GPU memory allocation]
XLA_PYTHON_CLIENT_PREALLOCATE false: GPU memory is allocated as needed, not 75% at start
XLA_PYTHON_CLIENT_MEM_FRACTION older name of XLA_CLIENT_MEM_FRACTION
XLA_PYTHON_CLIENT_ALLOCATOR default, bfc, cuda_async, vmm, address or platform (slow: no pool)
TF_GPU_ALLOCATOR cuda_malloc_async: CUDA's own memory pool is used
TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC bytes that cuda_malloc_async allocates at start; -1: JAX's default

[JAX | JAX documentation, Configuration Options]
JAX_PLATFORMS backends to use, in this order, such as cuda,cpu
JAX_COMPILATION_CACHE_DIR directory of compiled programs
JAX_ENABLE_COMPILATION_CACHE 0: compiled programs are not cached in a directory
JAX_COMPILATION_CACHE_MAX_SIZE size limit in bytes of the cache of compiled programs
JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS programs that compile faster are not cached (default 1)
JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES smaller programs are not cached
JAX_COMPILATION_CACHE_EXPECT_PGLE 1: programs compiled with profile data are preferred in the cache
JAX_ENABLE_PGLE 1: programs are profiled, then compiled again with the measured latencies
JAX_PGLE_PROFILING_RUNS number of profiled runs before the second compilation
JAX_PGLE_AGGREGATION_PERCENTILE percentile of the measured latencies over devices
JAX_DEFAULT_MATMUL_PRECISION precision of float32 GEMMs
JAX_ENABLE_X64 1: 64-bit types are enabled
JAX_DISABLE_JIT !CK020 jit is disabled: every operation runs on its own
JAX_DEBUG_NANS !CK020 every result is checked for NaN
JAX_DEBUG_INFS !CK020 every result is checked for infinities
JAX_LOG_COMPILES 1: every compilation is logged
JAX_EXPLAIN_CACHE_MISSES 1: reasons for compilations are logged
JAX_TRANSFER_GUARD allow, log or disallow implicit transfers between host and device

[JAX | jaxlib/xla_client.py]
XLA_CLIENT_MEM_FRACTION share of GPU memory that is allocated at start
XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB size of the memory pool for collectives

[JAX | jax/_src/xla_bridge.py; jax_plugins/cuda/__init__.py]
JAX_CUDA_VISIBLE_DEVICES indices of the devices that JAX uses
JAX_SKIP_CUDA_CONSTRAINTS_CHECK any value, even 0: the versions of CUDA's libraries are not checked

[JAX | JAX documentation, XLA compiler flags]
XLA_FLAGS options of the XLA compiler

[JAX | XLA source code, GPU client]
TF_FORCE_UNIFIED_MEMORY 1: GPU memory is managed memory and may exceed the GPU
XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB limit on pinned host memory
XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE 1: pinned host memory is allocated at start

[Numba | numba_cuda/numba/cuda/core/config.py]
NUMBA_ENABLE_CUDASIM !CK020 kernels run on the CPU in Numba's simulator
NUMBA_DISABLE_CUDA !CK020 Numba uses no GPU
NUMBA_CUDA_DEBUGINFO !CK020 kernels are compiled with debug information
NUMBA_CUDA_ARRAY_INTERFACE_SYNC 0: no synchronization when arrays are exchanged
NUMBA_CUDA_DEFAULT_PTX_CC compute capability that PTX is compiled for
NUMBA_FORCE_CUDA_CC compute capability that kernels are compiled for
NUMBA_CUDA_DRIVER path of libcuda
NUMBA_CUDA_INCLUDE_PATH directory of CUDA's headers
NUMBA_CUDA_LOG_LEVEL log level of calls to the driver
NUMBA_CUDA_LOG_API_ARGS 1: the log of calls to the driver includes arguments
NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS 0: no warnings about small grids
NUMBA_CUDA_WARN_ON_IMPLICIT_COPY 0: no warnings about copies of host arrays
NUMBA_CUDA_MEMORY_MANAGER module of the memory manager
NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT number of deferred deallocations
NUMBA_CUDA_MAX_PENDING_DEALLOCS_RATIO share of GPU memory in deferred deallocations
NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM 1: each thread has its own default stream
NUMBA_CUDA_USE_NVIDIA_BINDING 1: the driver is called through cuda-bindings

[CuPy | CuPy documentation, Environment variables]
CUPY_CACHE_DIR directory of compiled kernels
CUPY_CACHE_IN_MEMORY 1: compiled kernels are not stored on disk: every process compiles again
CUPY_CACHE_SAVE_CUDA_SOURCE 1: the cache includes the source of kernels
CUPY_NVRTC_USE_PCH 1: NVRTC uses precompiled headers
CUPY_DUMP_CUDA_SOURCE_ON_ERROR 1: source is printed if a kernel does not compile
CUPY_CUDA_COMPILE_WITH_DEBUG !CK020 kernels are compiled with debug information
CUPY_COMPILE_WITH_PTX 1: kernels are compiled to PTX instead of machine code
CUPY_GPU_MEMORY_LIMIT limit on memory per device, in bytes or percent
CUPY_ACCELERATORS libraries for operations, in order: cub, cutensor, cutensornet
CUPY_TF32 1 allows TF32 in float32 operations
CUPY_CUDA_PER_THREAD_DEFAULT_STREAM 1: each thread has its own default stream
CUPY_CUDA_ARRAY_INTERFACE_SYNC 0: no synchronization when arrays are imported
CUPY_CUDA_ARRAY_INTERFACE_EXPORT_VERSION 2: the stream of exported arrays is not passed on

[cudakit | cudakit documentation, reference page cudakit]
CUDAKIT_ALLOC_CONF settings of cudakit's allocator; without it, those of PyTorch's variables apply
CUDAKIT_DEBUG any value, even 0: errors of cudakit show a traceback
CUDAKIT_CACHE_DIR directory of cudakit's cache of compiled kernels (default ~/.cache/cudakit)
CUDAKIT_PTXAS ptxas that `cudakit run --sanitize` uses
CUDAKIT_SANITIZER_LIBRARY Sanitizer API library that `cudakit run --sanitize` uses
CUDAKIT_NCCL_LIBRARY NCCL library that `cudakit bench nccl` uses
CUDAKIT_CUPTI_LIBRARY CUPTI library that `cudakit run --profile` uses

[cudakit | XDG Base Directory Specification]
XDG_CACHE_HOME parent of cudakit's cache of compiled kernels (default ~/.cache)
"""


_OFF_VALUES = ("", "0", "false", "f", "no", "n", "off")
_SWITCH_MARK = "1: "  # begins the effect of a switch in the table
# Minimum workspace of cuBLASLt. Its kernels for Hopper need 32 MiB; few kernels can run with less than 1 MiB.
_MIN_WORKSPACE_KIB = 1024
_WORKSPACE_FORM = re.compile(r"(:\d+:\d+)+")


@dataclass(frozen=True, slots=True)
class VariableRule:
    """A warning about some values of a variable. The texts have the placeholders {name} and {value}."""

    name: str
    matches_value: Callable[[str], bool]  # function that returns whether a value gets the warning
    message: str
    fix: str = "unset {name}"


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF_VALUES


def rules_of(check: str, fix: str = "unset {name}") -> tuple[VariableRule, ...]:
    """Return the rules of the table for a check. Each rule warns if its variable is set to an "on" value."""
    return tuple(
        VariableRule(
            known_variable.name, _is_on, f"{{name}}={{value}}: {known_variable.effect}", fix
        )
        for known_variable in known_variables().values()
        if known_variable.check == check
    )


def apply_rules(rules: Iterable[VariableRule], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the warning of each rule that applies to the value of its variable."""
    for rule in rules:
        variable_value = variables.get(rule.name)
        if variable_value is not None and rule.matches_value(variable_value):
            message, fix = (
                template.format(name=rule.name, value=variable_value)
                for template in (rule.message, rule.fix)
            )
            yield warn_finding(message, {rule.name: variable_value}, fix)


def set_variables(context: RunContext) -> tuple[SetVariable, ...]:
    """Return the variables of the table that are set, with their values and effects."""
    known_by_name = known_variables()
    value_by_name = {**context.software.nccl_conf, **context.variables}
    return tuple(
        SetVariable(
            name,
            value_by_name[name],
            _effect_of(known_variable, value_by_name[name]),
            known_variable.library,
            known_variable.source,
        )
        for name, known_variable in known_by_name.items()
        if name in value_by_name
    )


def _effect_of(known_variable: Variable, value: str) -> str:
    is_switch = known_variable.effect.startswith(_SWITCH_MARK)
    effect = known_variable.effect.removeprefix(_SWITCH_MARK)
    if (is_switch or known_variable.check) and not _is_on(value):
        # With an empty value, libraries use their default, which may be on.
        return f"{'off' if value.strip() else 'empty'}; if on, {effect}"
    return effect


# --- CK020: debugging ------------------------------------------------------------------------------


def debugging(context: RunContext) -> Finding:
    """Debugging variables make CUDA programs slow if they stay set.

    CUDA_LAUNCH_BLOCKING=1 is the best known: every launch waits for its kernel, so nothing overlaps. Other
    variables compile every kernel again, disable PyTorch's caching allocator, or run Numba's and Triton's
    kernels on the CPU.
    """
    findings = apply_rules(rules_of("CK020"), context.variables)
    return combine_findings(findings, otherwise=ok_finding("no debugging variable is set"))


# --- CK021: allocators -----------------------------------------------------------------------------


def allocator(context: RunContext) -> Finding:
    """PYTORCH_ALLOC_CONF, and its older name PYTORCH_CUDA_ALLOC_CONF, set up PyTorch's allocator.

    The form is key:value,key:value. An unknown key or an invalid value stops the program at its first use
    of CUDA; PyTorch ignores some other mistakes silently. The keys are those of PyTorch 2.15; older
    versions refuse newer keys. If both variables are set, the older name wins, even if it is empty. With
    backend:cudaMallocAsync the keys of the native allocator have no effect. CUDAKIT_ALLOC_CONF has the
    same form and sets up cudakit's allocator, which rejects every mistake and has only the native backend.
    """
    settings = {name: context.variables[name] for name in VARIABLES if name in context.variables}
    if not any(settings.values()):
        return ok_finding("PyTorch's allocator has its default settings")
    pytorch_settings = {name: settings[name] for name in PYTORCH_VARIABLES if name in settings}
    # PyTorch reads the first of its variables only; CUDAKIT_ALLOC_CONF configures another allocator.
    applied_settings = [*pytorch_settings.items()][:1] + [
        (name, text) for name, text in settings.items() if name not in pytorch_settings
    ]
    warnings = [
        warning for name, text in applied_settings for warning in _invalid_settings(name, text)
    ]
    if len(set(pytorch_settings.values())) > 1:
        pytorch_name = applied_settings[0][0]
        warnings.append(
            warn_finding(
                f"both {' and '.join(pytorch_settings)} are set; {pytorch_name} wins",
                pytorch_settings,
                f"unset {pytorch_name}",
            )
        )
    applied_text = " and ".join(f"{name}={text}" for name, text in applied_settings)
    return combine_findings(
        warnings, otherwise=ok_finding(f"the settings of {applied_text} are valid", settings)
    )


def _invalid_settings(name: str, text: str) -> Iterator[Finding]:
    try:
        settings = parse_config(text, variable=name)
    except InputError as error:
        fix = error.hint or f"correct the value, or unset {name}"
        yield warn_finding(error.message, {name: text}, fix)
        return
    if name not in PYTORCH_VARIABLES and settings.backend != "native":
        yield warn_finding(
            f"cudakit's allocator does not support backend:{settings.backend} of {name}",
            {name: text},
            f"remove backend:{settings.backend} from {name}",
        )


# --- CK022: NCCL -----------------------------------------------------------------------------------


def nccl(context: RunContext) -> Finding:
    """Some NCCL variables disable fast transfers, and often remain in scripts after debugging.

    NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_IB_DISABLE each disable one kind of transfer;
    NCCL_DEBUG=INFO or TRACE writes long logs. NCCL also reads /etc/nccl.conf; the environment overrides
    it. Variables that describe the machine get no warning: network interfaces (NCCL_SOCKET_IFNAME,
    NCCL_IB_HCA) and features that a virtual machine lacks (NCCL_NVLS_ENABLE=0).
    """
    settings = {**context.software.nccl_conf, **context.variables}
    nccl_settings = {
        name: variable_value
        for name, variable_value in sorted(settings.items())
        # NVIDIA's container images set NCCL_VERSION; NCCL does not read it.
        if name.startswith("NCCL_") and name != "NCCL_VERSION" and not _nearest_variable(name)
    }
    finding = ok_finding(
        f"no setting of NCCL gets a warning; set: {', '.join(nccl_settings)}", nccl_settings
    )
    return combine_findings(
        (
            *apply_rules(rules_of("CK022", _NCCL_FIX), settings),
            *apply_rules(_RENAMED_VARIABLES, settings),
            *_nccl_log_warning(settings),
        ),
        otherwise=finding if nccl_settings else ok_finding("NCCL has its default settings"),
    )


_NCCL_FIX = "unset {name}, unless this machine needs it"
_RENAMED_VARIABLES = tuple(
    VariableRule(
        row.name,
        lambda value: True,  # noqa: ARG005
        f"PyTorch 2.2 and newer read TORCH_{row.name} instead of {row.name}",
        f"export TORCH_{row.name}={{value}}; unset {row.name}",
    )
    for row in known_variables().values()
    if row.effect.startswith("former name of")
)


def _nccl_log_warning(settings: Mapping[str, str]) -> Iterator[Finding]:
    log_level = settings.get("NCCL_DEBUG", "").upper()
    if log_level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn_finding(
            f"NCCL_DEBUG={log_level}: every rank writes a long log",
            {"NCCL_DEBUG": log_level},
            "export NCCL_DEBUG=WARN",
        )


# --- CK023: cuBLAS and cuDNN -----------------------------------------------------------------------


def math_libraries(context: RunContext) -> Finding:
    """Variables of cuBLAS and cuDNN change speed, precision, determinism and logging.

    NVIDIA_TF32_OVERRIDE=0 disables TF32 everywhere: float32 GEMMs then run without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes all float32 GEMMs use TF32, with less precision than a program
    may expect. torch.use_deterministic_algorithms needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small value excludes the fast kernels.
    """
    math_settings = {
        name: context.variables[name]
        for name in sorted(context.variables)
        if (name.startswith(("CUBLAS", "CUDNN_")) or "TF32" in name) and not _nearest_variable(name)
    }
    finding_if_ok = ok_finding(
        f"no setting slows down cuBLAS or cuDNN; set: {', '.join(math_settings)}", math_settings
    )
    return combine_findings(
        apply_rules((*rules_of("CK023"), *_MATH_RULES), context.variables),
        otherwise=finding_if_ok
        if math_settings
        else ok_finding("cuBLAS and cuDNN have their default settings"),
    )


_MATH_RULES = (
    VariableRule(
        "NVIDIA_TF32_OVERRIDE",
        "0".__eq__,
        "{name}={value}: no library uses TF32, so float32 GEMMs are far slower",
    ),
    VariableRule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "1".__eq__,
        "{name}={value}: float32 GEMMs have only the precision of TF32",
    ),
    VariableRule(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: not _WORKSPACE_FORM.fullmatch(value),
        "{name}={value} does not have the form :KiB:count",
        "export {name}=:4096:8",
    ),
    VariableRule(
        "CUBLASLT_WORKSPACE_SIZE",
        lambda value: value.isdecimal() and int(value) < _MIN_WORKSPACE_KIB,
        "{name}={value} KiB is too small for cuBLASLt's fast kernels",
    ),
)


# --- CK024: misspellings ---------------------------------------------------------------------------

_VARIABLE_PREFIXES = (
    "CUDA",
    "NVIDIA_",
    "NVTX_",
    "CUBLAS",
    "CUDNN",
    "PYTORCH_",
    "TORCH",
    "NCCL_",
    "TRITON_",
    "JAX_",
    "XLA_",
    "NUMBA_CUDA",
    "NUMBA_ENABLE_CUDA",
)
# Minimum length of a name in which two letters may be wrong. In a shorter name, only one may be.
_LONG_NAME_LENGTH = 16


def misspelled(context: RunContext) -> Finding:
    """A misspelled environment variable has no effect, and no library reports it.

    CUDA_VISIBLE_DEVICE=1 (without the S) hides no device. A name is reported if it differs by one letter
    (two in a long name) or two swapped letters from a variable of CUDA, its libraries or frameworks, or of
    cudakit.
    """
    return combine_findings(
        (
            warn_finding(
                f"no library reads {name}; the variable is {correct_name}",
                {name: context.variables[name]},
                f"export {correct_name}={context.variables[name]}; unset {name}",
            )
            for name in sorted(context.variables)
            for correct_name in _nearest_variable(name)
        ),
        otherwise=ok_finding("no misspelled environment variable"),
    )


def _nearest_variable(name: str) -> tuple[str, ...]:
    """Return the known name that a misspelled name is most similar to, or an empty tuple."""
    known_by_name, upper_name = known_variables(), name.upper()
    if name in known_by_name or not upper_name.startswith(_VARIABLE_PREFIXES):
        return ()
    distance, nearest_name = min(
        (_edit_distance(upper_name, candidate), candidate) for candidate in known_by_name
    )
    return (
        (nearest_name,) if distance <= (2 if len(nearest_name) >= _LONG_NAME_LENGTH else 1) else ()
    )


def _edit_distance(first_text: str, second_text: str) -> int:
    """Return the number of inserted, deleted, replaced or swapped letters between two texts.

    Two adjacent letters in the wrong order count once (optimal string alignment distance).
    """
    if abs(len(first_text) - len(second_text)) > 2:
        return 3  # every distance above 2 means that the names are not similar
    rows = [list(range(len(second_text) + 1))]
    for row_number, first_letter in enumerate(first_text, start=1):
        row = [row_number]
        for column, second_letter in enumerate(second_text, start=1):
            distance = min(
                rows[-1][column] + 1,
                row[-1] + 1,
                rows[-1][column - 1] + (first_letter != second_letter),
            )
            first_pair = first_text[max(row_number - 2, 0) : row_number]
            second_pair = second_text[max(column - 2, 0) : column]
            if len(first_pair) == 2 and first_pair == second_pair[::-1]:
                distance = min(distance, rows[-2][column - 2] + 1)
            row.append(distance)
        rows.append(row)
    return rows[-1][-1]
