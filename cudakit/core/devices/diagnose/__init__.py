"""``doctor``: diagnose the CUDA set-up and GPU health, by checks of a RunContext. Pure."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection

from cudakit.core.devices.diagnose.check import (
    EXPLANATION_SCHEMA,
    SCHEMA,
    Check,
    DeviceLine,
    DoctorResult,
    Explanation,
    Judged,
    Status,
)
from cudakit.core.devices.diagnose.checks import SELF_TEST, THEMES, checks_by_id
from cudakit.core.devices.diagnose.driver import (
    cuda_text,
    driver_cuda,
    libcuda_path,
    nvml_library_version,
)
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# The packages whose versions a report names.
_PACKAGES = (
    "cudakit",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "jax",
    "numba",
    "numba-cuda",
    "triton",
    "cuda-bindings",
    "cuda-core",
    "nvidia-ml-py",
    "nvtx",
)


def diagnose(
    context: RunContext,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    deep: bool = False,
) -> DoctorResult:
    """Run the checks: all, or ``only`` some, without those to ``skip``; ``deep`` adds the self-test.

    Raises UsageError for an id that no check has, and for a self-test without ``deep``.
    """
    refuse_unknown(only, skip, deep=deep)
    themes = {**THEMES, **SELF_TEST} if deep else THEMES
    checks = tuple(
        _run(theme, check, context)
        for theme, members in themes.items()
        for check in members
        if (not only or check.id in only) and check.id not in skip
    )
    counts = Counter(check.status for check in checks)
    return DoctorResult(
        schema=SCHEMA,
        simulated=context.simulated,
        status=max((check.status for check in checks), default=Status.OK),
        counts={status.name.lower(): counts[status] for status in Status},
        about=versions(context),
        # Those that NVML knows, else those that CUDA knows.
        devices=tuple(
            _line(one) for one in context.nvml_devices or context.cuda_devices if one.parent is None
        ),
        checks=checks,
    )


def _run(theme: str, check: Check, context: RunContext) -> Judged:
    found = check.run(context)
    return Judged(
        check.id, theme, check.title, found.status, found.summary, found.evidence, found.fix
    )


def refuse_unknown(only: Collection[str], skip: Collection[str], *, deep: bool) -> None:
    """Raise UsageError for a selection of checks that cannot be run."""
    for name in (*only, *skip):
        find(name)
    refused = {check.id for members in SELF_TEST.values() for check in members} & set(only)
    if not deep and refused:
        raise UsageError(
            f"{', '.join(sorted(refused))} uses the GPU", hint="add --deep to allow it"
        )


def find(name: str) -> Check:
    """Return the check of an id. Raises UsageError if there is none."""
    known = checks_by_id()
    if name not in known:
        raise UsageError(
            f"there is no check {name!r}",
            hint=f"checks are {min(known)} to {max(known)}: cudakit doctor lists them",
        )
    return known[name]


def explain(name: str) -> Explanation:
    """Return what a check examines and why. Raises UsageError for an id that no check has."""
    check = find(name)
    return Explanation(EXPLANATION_SCHEMA, check.id, check.title, check.explanation)


# --- versions and devices --------------------------------------------------------------------------


def versions(c: RunContext) -> dict[str, str]:
    """Return the known versions of system, driver and packages."""
    offered = driver_cuda(c)
    found = {
        "system": c.host.distribution,
        "kernel": c.host.kernel,
        "container": c.host.container or ("WSL" if c.host.is_wsl else ""),
        "driver": _driver(c),
        "NVML": nvml_library_version(c),
        "CUDA of the driver": None if offered is None else cuda_text(offered),
        "libcuda": libcuda_path(c),
        "Python": platform.python_version(),
        **_packages(c),
    }
    return {label: text for label, text in found.items() if text}


def _driver(c: RunContext) -> str | None:
    module = c.driver.module
    if module:
        return f"{module.version} ({'open' if module.is_open else 'proprietary'} kernel module)"
    version = None if isinstance(c.nvml, Unavailable) else c.nvml.driver_version
    return version if isinstance(version, str) else None


def _packages(c: RunContext) -> dict[str, str]:
    if isinstance(c.software.distributions, Unavailable):
        return {}
    installed = {one.name: one.version for one in reversed(c.software.distributions)}
    return {name: installed[name] for name in _PACKAGES if name in installed}


def _line(device: DeviceFacts) -> DeviceLine:
    def text(name: str) -> str | Unavailable:
        value = device.fields.get(name, Unavailable("not asked for"))
        return value if isinstance(value, (str, Unavailable)) else str(value)

    memory = device.fields.get("memory_total_bytes", device.fields.get("usable_memory_bytes"))
    return DeviceLine(
        index=device.index,
        name=text("name"),
        uuid=device.uuid,
        pci_bus_id=device.pci_bus_id,
        compute_capability=text("compute_capability"),
        memory_bytes=memory if isinstance(memory, int) else Unavailable("not known"),
    )
