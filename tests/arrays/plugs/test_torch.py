from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from arrays.plugs.allocating import Allocating

from cudakit.arrays.plugs.torch import UPSTREAMS, native_library, pool, pool_of, upstream_name
from cudakit.errors import EnvironmentUnusable, MissingDependency, UsageError


def library() -> str:
    try:
        return native_library()
    except EnvironmentUnusable:
        pytest.skip("installed without a compiler")


def fake_torch(**attributes: type) -> Any:
    """Return a fake of torch's memory pools; ``attributes`` are the options that a pool accepts."""

    def mem_pool(allocator: object, **options: bool) -> object:
        if unknown := options.keys() - attributes:
            raise TypeError(f"MemPool got an unexpected argument {min(unknown)!r}")
        return allocator, options

    def pluggable(*arguments: str) -> Any:
        return SimpleNamespace(allocator=lambda: arguments)

    memory = SimpleNamespace(CUDAPluggableAllocator=pluggable)
    return SimpleNamespace(__version__="2.7", cuda=SimpleNamespace(memory=memory, MemPool=mem_pool))


def test_torch_pool_uses_two_c_functions() -> None:
    pool = pool_of(fake_torch(), "/lib.so", "managed", {"no_split": False})

    assert pool == (("/lib.so", "cudakit_managed_alloc", "cudakit_managed_free"), {})


def test_torch_pool_passes_enabled_options() -> None:
    _, options = pool_of(
        fake_torch(no_split=bool), "/lib.so", "async", {"no_split": True, "use_on_oom": False}
    )

    assert options == {"no_split": True}


def test_unknown_torch_option_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch 2\.7 cannot create this MemPool: .*'no_split'"):
        pool_of(fake_torch(), "/lib.so", "async", {"no_split": True})


def test_python_allocator_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UsageError, match=r"cannot use Allocating .* holding its own lock"
    ) as caught:
        upstream_name(Allocating())
    assert caught.value.hint.endswith("driver, managed, async")


def test_unknown_upstream_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="no upstream is named 'pinned'") as caught:
        upstream_name("pinned")
    assert caught.value.hint == "one of driver, managed, async"


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingDependency) as caught:
        pool("managed", {})
    assert caught.value.hint == "pip install 'torch'"


@pytest.mark.parametrize("kind", UPSTREAMS)
def test_library_exports_the_functions_of_every_kind(kind: str) -> None:
    opened = ctypes.CDLL(library())

    assert getattr(opened, f"cudakit_{kind}_alloc")
    assert getattr(opened, f"cudakit_{kind}_free")


# Run in a separate process, so that a crash does not end the tests.
WITHOUT_DEVICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for kind in sys.argv[2:]:
    alloc, free = (getattr(library, f"cudakit_{kind}_{name}") for name in ("alloc", "free"))
    alloc.restype = ctypes.c_void_p
    alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free.restype = None
    print([alloc(size, 999, None) for size in (100, 0, -1)])
    free(4096, 100, 999, None)
    free(None, 0, 0, None)
"""


def test_functions_return_null_for_a_missing_device() -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_DEVICE, library(), *UPSTREAMS]
    result = subprocess.run(command, check=True, capture_output=True, text=True)

    assert result.stdout.splitlines() == ["[None, None, None]"] * len(UPSTREAMS)
