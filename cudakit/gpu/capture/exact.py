"""Exact accesses: whether they can be had, and a device patch for each kind of device, built beforehand."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.capture.locate import Places
from cudakit.gpu.capture.patch.build import build_patch
from cudakit.gpu.capture.preflight import Ready
from cudakit.gpu.compile_cache import user_cache
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.units import Unavailable

Accesses: TypeAlias = Literal["exact", "arguments"]
Capability: TypeAlias = tuple[int, int]
Build: TypeAlias = Callable[[Capability, Places], bytes]

_OLDEST = (8, 0)  # that a patch can be built for


def with_accesses(
    ready: Ready,
    wanted: Accesses | None,
    directory: Path,
    *,
    devices: Callable[[], Collection[Capability]] | None = None,
    build: Build | None = None,
) -> tuple[Ready, str]:
    """Return what is ready with the patches of exact accesses, and why there are none where that is news.

    Accesses that are not ``wanted`` in one way are exact where they can be. The patches are files in
    ``directory``. ``devices`` and ``build`` take the place of NVML and the compiler. Without a device there
    are none, and nothing is missed. Raises EnvironmentUnusable where exact ones are wanted and cannot be.
    """
    if wanted == "arguments":
        return ready, ""
    try:
        images = _images((devices or capabilities)(), build or _built, ready)
    except EnvironmentUnusable as error:
        if wanted == "exact":
            raise
        return ready, f"accesses are assumed from arguments: {_in_one_line(error)}"
    patches = {}
    for number, image in images.items():
        patches[number] = directory / f"sm_{number}.cubin"
        patches[number].write_bytes(image)
    return replace(ready, patches=patches), ""


def capabilities(nvml: Nvml | Unavailable | None = None) -> frozenset[Capability]:
    """Return the compute capabilities of the devices of this machine, without a context on any.

    Raises EnvironmentUnusable where there are devices and NVML does not tell.
    """
    from cudakit.gpu.cuda.current import device_count

    nvml = nvml or open_nvml()
    found = nvml if isinstance(nvml, Unavailable) else nvml.capabilities()
    if isinstance(found, Unavailable):
        if not device_count():
            return frozenset()
        raise EnvironmentUnusable(
            f"the compute capability of the devices is not known: {found.reason}",
            hint="see what cudakit doctor says",
        )
    return found


def _images(found: Collection[Capability], build: Build, ready: Ready) -> dict[int, bytes]:
    """Build what can be built; a device that is too old beside newer ones goes without."""
    here = Places.here()
    places = replace(here, packages=(*here.packages, *ready.packages))
    wanted = [one for one in sorted(found) if one >= _OLDEST] or sorted(found)
    return {major * 10 + minor: build((major, minor), places) for major, minor in wanted}


def _built(capability: Capability, places: Places) -> bytes:
    return build_patch(capability, places=places, cache=user_cache(os.environ))


def _in_one_line(error: EnvironmentUnusable) -> str:
    said = error.message.partition("\n")[0]
    return f"{said}; {error.hint}" if error.hint else said
