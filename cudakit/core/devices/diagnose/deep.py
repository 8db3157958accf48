"""Did using the GPU for real go well? Judged from the steps that ``--deep`` took in a child process."""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.gpu.api.run_context import RunContext, SelfTestStep
from cudakit.units import Unavailable


def context(c: RunContext) -> Finding:
    """A context is what a program has on a device: the first thing it makes, and a few hundred MiB.

    It fails where cuInit still worked if the device is held exclusively (46), has no memory left (2), or
    is broken.
    """
    return _judged(c, "context", "a context can be made")


def compiler(c: RunContext) -> Finding:
    """NVRTC compiles CUDA C++ at run time; CuPy, Numba, PyTorch and cudakit use it.

    It is looked for where Python packages and the toolkit put it. It must know the GPU's compute
    capability: CK010.
    """
    return _judged(c, "compile", "NVRTC compiles for this GPU")


def kernel(c: RunContext) -> Finding:
    """A small kernel of known result runs on every multiprocessor; each value is compared.

    A wrong value with no error reported is the mark of bad hardware (silent data corruption).
    """
    return _judged(c, "kernel", "a kernel computes what it should")


def copies(c: RunContext) -> Finding:
    """Bytes copied to the device and back must be the same ones.

    From pinned host memory, over PCIe or NVLink-C2C, and within the device.
    """
    return _judged(c, "copy", "copies to the GPU and back are exact")


def _judged(c: RunContext, name: str, well: str) -> Finding:
    require_driver(c)
    if isinstance(c.self_test, Unavailable):
        raise CannotTell(c.self_test.reason)
    step = next((trial for trial in c.self_test if trial.name == name), None)
    if step is None:
        raise CannotTell("a step before this one failed")
    if step.error:
        return fail(step.error, step.seen, *_hints(step))
    return ok(well + _seen(step), step.seen)


def _hints(step: SelfTestStep) -> tuple[str, ...]:
    return (step.hint,) if step.hint else ()


def _seen(step: SelfTestStep) -> str:
    told = ", ".join(dict.fromkeys(step.seen.values()))
    return f" ({told})" if told else ""
