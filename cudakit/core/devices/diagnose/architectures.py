"""Can the installed builds make code for these GPUs?"""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, together
from cudakit.core.devices.diagnose.packages import frameworks
from cudakit.core.devices.diagnose.versions import cuda_text
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_Capability = tuple[int, int]

# The first CUDA whose compilers know a compute capability (release notes of the CUDA Toolkit).
_FIRST_CUDA: dict[_Capability, _Capability] = {
    (7, 0): (9, 0),
    (7, 2): (9, 2),
    (7, 5): (10, 0),
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
# The least capability that a CUDA still compiles for: 12 dropped Kepler, 13 Maxwell, Pascal and Volta.
_LEAST: dict[int, _Capability] = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
# What cudakit is tested from on.
_OURS: _Capability = (7, 5)


def supported(c: RunContext) -> Finding:
    """A framework must contain code for the GPU's compute capability, or PTX that the driver compiles.

    A build for CUDA 12.4 cannot contain code for Blackwell, which CUDA 12.8 was the first to know, and
    one for CUDA 13 contains none for Volta and older: kernels then fail with 209 ("no kernel image is
    available"). Judged by the CUDA that each framework was built for; a build may leave out more, which
    only running it tells (torch.cuda.get_arch_list()).
    """
    devices = _capabilities(c)
    names = ", ".join(f"{name} ({_text(found)})" for name, found in devices.items())
    evidence = {name: f"compute capability {_text(found)}" for name, found in devices.items()}
    problems = [
        *_too_old_for_us(devices, evidence),
        *_by_frameworks(c, devices, evidence),
    ]
    return together(
        problems, otherwise=ok(f"the installed builds can have code for {names}", evidence)
    )


def _capabilities(c: RunContext) -> dict[str, _Capability]:
    """Return the compute capability of each kind of GPU."""
    devices: tuple[DeviceFacts, ...] = ()
    for view in (c.cuda, c.nvml):
        if not isinstance(view, Unavailable):
            devices = devices or view.devices
    found = {}
    for device in devices:
        name, capability = device.fields.get("name"), device.fields.get("compute_capability")
        if isinstance(name, str) and isinstance(capability, str):
            major, _, minor = capability.partition(".")
            found[name] = (int(major), int(minor))
    if not found:
        raise CannotTell("no GPU tells its compute capability (CK003, CK005)")
    return found


def _too_old_for_us(devices: dict[str, _Capability], evidence: dict[str, str]) -> Iterator[Finding]:
    for name, capability in devices.items():
        if capability < _OURS:
            yield fail(
                f"{name} has compute capability {_text(capability)}; cudakit needs {_text(_OURS)}",
                evidence,
                "use a GPU of the Turing generation or newer",
            )


def _by_frameworks(
    c: RunContext, devices: dict[str, _Capability], evidence: dict[str, str]
) -> Iterator[Finding]:
    for build in frameworks(c):
        for name, capability in devices.items():
            reason = _reason(build.cuda, capability) if build.cuda else ""
            if reason:
                yield fail(
                    f"{build.framework} {build.version} has no code for {name} "
                    f"(sm_{capability[0]}{capability[1]}): {reason}",
                    {**evidence, build.framework: f"CUDA {cuda_text(build.cuda or (0, 0))}"},
                    _remedy(capability),
                )


def _reason(cuda: tuple[int, int | None], capability: _Capability) -> str:
    first = _FIRST_CUDA.get(capability)
    # Of a build whose minor version is not known the best is assumed.
    newest = (cuda[0], 99 if cuda[1] is None else cuda[1])
    if first and newest < first:
        return f"CUDA {cuda_text(first)} was the first to know it"
    if capability < _LEAST.get(cuda[0], (0, 0)):
        return f"CUDA {cuda[0]} dropped it"
    return ""


def _remedy(capability: _Capability) -> str:
    first = _FIRST_CUDA.get(capability, (0, 0))
    if capability < _LEAST[13]:
        return "install a build for CUDA 12 (of PyTorch: its index cu126)"
    return f"install a build for CUDA {cuda_text(first)} or newer"


def _text(capability: _Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
