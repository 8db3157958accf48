"""What the examples with cuda-python share: a device, and calls that raise when they fail."""

from cuda.bindings import driver


def call(answer):
    """Return what a call of the driver gave. Raises RuntimeError with the driver's name of a failure."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


def open_device():
    """Make the first device's primary context current, and return it."""
    call(driver.cuInit(0))
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    return context


def stream(*, blocking=True):
    """Make a stream: ordered with the legacy default stream, or not."""
    flags = driver.CUstream_flags
    chosen = flags.CU_STREAM_DEFAULT if blocking else flags.CU_STREAM_NON_BLOCKING
    return call(driver.cuStreamCreate(chosen))


def wait(waiting, awaited):
    """Make a stream wait for what another one has to do by now."""
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call(driver.cuEventRecord(event, awaited))
    call(driver.cuStreamWaitEvent(waiting, event, 0))
    call(driver.cuEventDestroy(event))
