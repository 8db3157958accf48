"""Functions that the programs with cuda-python share: open a device, compile kernels, check errors."""

import numpy as np
from cuda.bindings import driver, nvrtc


def call(answer):
    """Return what a call gave. Raises RuntimeError with the name of a failure."""
    status, *values = answer
    if status.value:
        raise RuntimeError(status.name)
    return values[0] if len(values) == 1 else tuple(values)


def open_device():
    """Make the first device's primary context current, and return it."""
    call(driver.cuInit(0))
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    return context


def stream():
    """Make a stream that is not ordered with the legacy default stream."""
    return call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def zeros(size_bytes):
    """Allocate memory of zeros, and return its address."""
    memory = call(driver.cuMemAlloc(size_bytes))
    call(driver.cuMemsetD8(memory, 0, size_bytes))
    call(driver.cuCtxSynchronize())
    return int(memory)


def compiled(source):
    """Compile kernels, all of whose parameters have eight bytes, for the current device."""
    device, kinds = call(driver.cuCtxGetDevice()), driver.CUdevice_attribute
    major, minor = (
        call(driver.cuDeviceGetAttribute(kind, device))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return call(driver.cuModuleLoadData(binary(source, f"sm_{major}{minor}")))


def binary(source, architecture):
    """Return the machine code of some kernels."""
    program = call(nvrtc.nvrtcCreateProgram(source.encode(), b"corpus.cu", 0, [], []))
    call(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()]))
    code = b" " * call(nvrtc.nvrtcGetCUBINSize(program))
    call(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def function(module, name):
    """Return a kernel of a module."""
    return call(driver.cuModuleGetFunction(module, name.encode()))


def packed(arguments):
    """Write arguments of eight bytes each; return them, and the addresses at which they are."""
    words = np.array([int(argument) for argument in arguments], np.uint64)
    places = words.ctypes.data + 8 * np.arange(len(words))
    return words, places.astype(np.uint64)


def launch(kernel, on, blocks, threads, *arguments, attributes=()):
    """Launch a kernel in a stream; ``attributes`` are those of ``cuLaunchKernelEx``."""
    words, places = packed(arguments)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = on
    config.attrs, config.numAttrs = list(attributes), len(attributes)
    call(driver.cuLaunchKernelEx(config, kernel, places.ctypes.data, 0))
    del words  # the launch has copied them by now


def wait(waiting, awaited):
    """Make a stream wait for what another one has to do by now."""
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call(driver.cuEventRecord(event, awaited))
    call(driver.cuStreamWaitEvent(waiting, event, 0))
    call(driver.cuEventDestroy(event))
