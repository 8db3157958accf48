"""Functions that the examples with cuda-python share: open a device, create streams, check errors."""

from cuda.bindings import driver


def call(result):
    """Return the value in the result of a driver call. Raises RuntimeError with the name of an error."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


def open_device():
    """Make the primary context of the first device current, and return the context."""
    call(driver.cuInit(0))
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    return context


def stream(*, blocking=True):
    """Create a stream; a blocking stream is ordered with the legacy default stream."""
    flags = driver.CUstream_flags
    flag = flags.CU_STREAM_DEFAULT if blocking else flags.CU_STREAM_NON_BLOCKING
    return call(driver.cuStreamCreate(flag))


def wait(waiting, awaited):
    """Make the stream ``waiting`` wait for the work that is already in the stream ``awaited``."""
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call(driver.cuEventRecord(event, awaited))
    call(driver.cuStreamWaitEvent(waiting, event, 0))
    call(driver.cuEventDestroy(event))
