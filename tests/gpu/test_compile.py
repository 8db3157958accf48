from __future__ import annotations

import pytest
from contract.kernels import SOURCE

from cudakit.errors import CudaError, MissingDependency
from cudakit.gpu.compile import choose_target, compile_cuda

SUPPORTED = [75, 80, 86, 90, 100, 120]


def has_nvrtc() -> bool:
    try:
        compile_cuda("", (7, 5))
    except MissingDependency:
        return False
    except CudaError:
        return True
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")


def test_supported_architecture_gets_cubin() -> None:
    assert choose_target((9, 0), SUPPORTED) == ("sm_90", "CUBIN")


def test_architecture_between_supported_gets_ptx_of_previous() -> None:
    assert choose_target((8, 9), SUPPORTED) == ("compute_86", "PTX")


def test_newer_architecture_gets_ptx_of_newest() -> None:
    assert choose_target((13, 1), SUPPORTED) == ("compute_120", "PTX")


def test_older_architecture_error_names_both() -> None:
    with pytest.raises(CudaError, match=r"sm_75 and newer.*sm_70"):
        choose_target((7, 0), SUPPORTED)


@needs_nvrtc
def test_source_compiles_to_cubin() -> None:
    assert compile_cuda(SOURCE, (9, 0)).startswith(b"\x7fELF")


@needs_nvrtc
def test_unknown_architecture_compiles_to_ptx() -> None:
    assert b".visible .entry add" in compile_cuda(SOURCE, (99, 0))


@needs_nvrtc
def test_compile_error_has_log() -> None:
    with pytest.raises(CudaError) as caught:
        compile_cuda("\n\n__global__ void broken() { missing(); }", (9, 0))

    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert "sm_90" in caught.value.message
    assert 'kernels.cu(3): error: identifier "missing" is undefined' in caught.value.message


@pytest.mark.skipif(has_nvrtc(), reason="needs a machine without NVRTC")
def test_missing_nvrtc_hint_is_install_command() -> None:
    with pytest.raises(MissingDependency) as caught:
        compile_cuda(SOURCE, (9, 0))
    assert "not installed" not in caught.value.message
    assert caught.value.hint.startswith("pip install 'nvidia-cuda-nvrtc")
    assert "(cuda.bindings searches the site-packages of this Python)" in caught.value.hint
    assert caught.value.hint.endswith("or set LD_LIBRARY_PATH to the directory of libnvrtc")
