"""Functions that the examples with cuda-python share: open a device, create streams, check errors."""

from cuda.bindings import driver


def call(answer):
    """Return the result of a driver call. Raises RuntimeError with the name of the driver's error."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return values[0] if values else None


def open_device():
    """Make the primary context of the first device current, and return it."""
    call(driver.cuInit(0))
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    return context


def stream(*, blocking=True):
    """Create a stream; a blocking one is ordered with the legacy default stream."""
    flags = driver.CUstream_flags
    chosen = flags.CU_STREAM_DEFAULT if blocking else flags.CU_STREAM_NON_BLOCKING
    return call(driver.cuStreamCreate(chosen))


def wait(waiting, awaited):
    """Make one stream wait for the present work of another."""
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call(driver.cuEventRecord(event, awaited))
    call(driver.cuStreamWaitEvent(waiting, event, 0))
    call(driver.cuEventDestroy(event))
