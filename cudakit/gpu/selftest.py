"""The self-test of the visible devices: create a context, compile with NVRTC, run a kernel, copy memory.

Results are compared with expected values, because broken hardware may report no error. The test runs in a
child process, so that crashes and hangs do not affect the caller. It allocates about 20 MiB per device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.errors import CudakitError
from cudakit.gpu.api import Gpu, Ptr
from cudakit.gpu.api.facts import SelfTestStep
from cudakit.gpu.probe import INJECTION_VARIABLES, last_line, without_variables
from cudakit.units import Unavailable, format_bytes

DEFAULT_SECONDS = 120
_STEP_NAMES = ("context", "compile", "kernel", "copy")
_VALUE_COUNT = 1 << 20  # number of values, computed by a thread each: several waves on every device
_SEED = 0x9E3779B9
_HASH_ROUNDS = 64  # iterations of the loop in SOURCE
SOURCE = """
extern "C" __global__ void hash_values(unsigned *out, unsigned count, unsigned seed) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    unsigned x = i ^ seed;
    for (int round = 0; round < 64; ++round) { x = x * 1664525u + 1013904223u; x ^= x >> 13; }
    out[i] = x;
}
"""


def run_self_test(
    *, command: Sequence[str] = (), seconds: float = DEFAULT_SECONDS
) -> tuple[SelfTestStep, ...] | Unavailable:
    """Run the steps in a child process until one fails; return Unavailable if the child cannot start.

    A crash or a timeout after ``seconds`` fails the current step. ``command`` replaces the child's command.
    """
    module_path = os.pathsep.join(filter(None, sys.path))
    try:
        child_result = subprocess.run(  # noqa: S603 runs a function of cudakit with this interpreter
            [*command] or [sys.executable, "-c", "from cudakit.gpu.selftest import child; child()"],
            env={**without_variables(os.environ, *INJECTION_VARIABLES), "PYTHONPATH": module_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as timeout:
        child_output = timeout.stdout or ""
        return _parse_steps(
            child_output if isinstance(child_output, str) else child_output.decode(), "timed out"
        )
    except OSError as error:
        return Unavailable(f"cannot start the process that tests the GPU: {error}")
    return _parse_steps(
        child_result.stdout,
        f"crashed: exit code {child_result.returncode}{last_line(child_result.stderr)}",
    )


def _parse_steps(text: str, exit_reason: str) -> tuple[SelfTestStep, ...]:
    """Parse the child's output, a line per step; ``exit_reason`` explains missing steps."""
    steps = tuple(SelfTestStep(**json.loads(line)) for line in text.splitlines())
    if len(steps) == len(_STEP_NAMES) or (steps and steps[-1].error):
        return steps
    return (
        *steps,
        SelfTestStep(_STEP_NAMES[len(steps)], f"step {_STEP_NAMES[len(steps)]!r} {exit_reason}"),
    )


# --- in the child process ----------------------------------------------------------------------------------


def child() -> None:
    """Run the steps, and write the result of each as a line of JSON."""
    pipe_descriptor = os.dup(1)
    os.dup2(2, 1)  # redirect output of libraries to stderr
    with open(pipe_descriptor, "w", encoding="utf-8") as result_stream:
        for step in run_steps(_open_all_devices):
            step_fields = {name: getattr(step, name) for name in ("name", "error", "hint")}
            result_stream.write(json.dumps({**step_fields, "details": dict(step.details)}) + "\n")
            result_stream.flush()


def _open_all_devices() -> list[Gpu]:
    from cudakit.gpu.cuda.driver import check, cu
    from cudakit.gpu.open import open_gpu

    first_gpu = open_gpu("cuda", 0)
    device_count = int(check(cu.cuDeviceGetCount()))
    return [first_gpu, *(open_gpu("cuda", ordinal) for ordinal in range(1, device_count))]


def run_steps(open_all: Callable[[], list[Gpu]]) -> Iterator[SelfTestStep]:
    """Run each step on every device; stop after the first failed step."""
    gpus: list[Gpu] = []
    images: list[bytes] = []

    def open_contexts() -> Iterator[str]:
        gpus.extend(open_all())
        yield from (f"{format_bytes(gpu.memory_info().free_bytes)} free" for gpu in gpus)

    def compile_for() -> Iterator[str]:
        for gpu in gpus:
            images.append(gpu.compile(SOURCE))
            yield f"{format_bytes(len(images[-1]))} of machine code"

    def run() -> Iterator[str]:
        yield from map(_run_kernel, gpus, images)

    def copy() -> Iterator[str]:
        yield from map(_round_trip, gpus)

    for name, step in zip(_STEP_NAMES, (open_contexts, compile_for, run, copy), strict=True):
        result = _run_step(name, step)
        yield result
        if result.error:
            return
    for gpu in gpus:
        gpu.close()


def _run_step(name: str, step: Callable[[], Iterator[str]]) -> SelfTestStep:
    details: dict[str, str] = {}
    try:
        for detail in step():
            details[f"cuda:{len(details)}"] = detail
    except CudakitError as error:
        return SelfTestStep(name, f"cuda:{len(details)}: {error.message}", error.hint, details)
    except _WrongValuesError as wrong_values:
        hint = "the hardware may be broken: run dcgmi diag -r 3"
        return SelfTestStep(name, f"cuda:{len(details)}: {wrong_values}", hint, details)
    return SelfTestStep(name, details=details)


class _WrongValuesError(Exception):
    """The device computed or copied incorrect values."""


def _run_kernel(gpu: Gpu, image: bytes) -> str:
    threads_per_block = 256
    size_bytes = _VALUE_COUNT * 4
    module, device_memory, host_memory = (
        gpu.load(image),
        gpu.malloc(size_bytes),
        gpu.host_malloc(size_bytes),
    )
    stream = gpu.stream()
    arguments = (device_memory, np.uint32(_VALUE_COUNT), np.uint32(_SEED))
    kernel = gpu.kernel(module, "hash_values")
    gpu.launch(
        kernel,
        (_VALUE_COUNT // threads_per_block, 1, 1),
        (threads_per_block, 1, 1),
        arguments,
        stream,
    )
    gpu.copy(host_memory, device_memory, size_bytes, stream)
    gpu.sync_stream(stream)
    _compare_values(
        _host_words(gpu, host_memory, size_bytes), _expected_values(), "the kernel computed"
    )
    gpu.free(device_memory)
    gpu.host_free(host_memory)
    return f"{_VALUE_COUNT:,} values compared"


def _round_trip(gpu: Gpu) -> str:
    """Copy from the host to the device, within the device, and back."""
    source_words = np.random.default_rng(_SEED).integers(0, 1 << 32, _VALUE_COUNT, dtype=np.uint32)
    size_bytes = source_words.nbytes
    device_source, device_target = gpu.malloc(size_bytes), gpu.malloc(size_bytes)
    host_source, host_target = gpu.host_malloc(size_bytes), gpu.host_malloc(size_bytes)
    stream = gpu.stream()
    _host_words(gpu, host_source, size_bytes)[:] = source_words
    for target, source in (
        (device_source, host_source),
        (device_target, device_source),
        (host_target, device_target),
    ):
        gpu.copy(target, source, size_bytes, stream)
    gpu.sync_stream(stream)
    _compare_values(_host_words(gpu, host_target, size_bytes), source_words, "the copies returned")
    for ptr in (device_source, device_target):
        gpu.free(ptr)
    for ptr in (host_source, host_target):
        gpu.host_free(ptr)
    return f"{format_bytes(size_bytes)} compared"


def _host_words(gpu: Gpu, ptr: Ptr, size_bytes: int) -> npt.NDArray[Any]:
    return np.frombuffer(gpu.host_view(ptr, size_bytes), dtype=np.uint32)


def _expected_values() -> npt.NDArray[Any]:
    """Compute the kernel's results on the host, in wrapping 32-bit arithmetic."""
    expected_words = np.arange(_VALUE_COUNT, dtype=np.uint32) ^ np.uint32(_SEED)
    for _ in range(_HASH_ROUNDS):
        expected_words = expected_words * np.uint32(1664525) + np.uint32(1013904223)
        expected_words ^= expected_words >> np.uint32(13)
    return expected_words


def _compare_values(
    actual_values: npt.NDArray[Any], expected_values: npt.NDArray[Any], origin: str
) -> None:
    mismatches = np.flatnonzero(actual_values != expected_values)
    if mismatches.size:
        first_mismatch = int(mismatches[0])
        raise _WrongValuesError(
            f"{origin} {mismatches.size:,} wrong values of {expected_values.size:,}; "
            f"index {first_mismatch}: {int(actual_values[first_mismatch]):#010x},"
            f" expected {int(expected_values[first_mismatch]):#010x}"
        )
