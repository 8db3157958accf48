from __future__ import annotations

import pytest
from contract.kernels import SOURCE

from cudakit.errors import CudaError, MissingDependency
from cudakit.gpu.compile import choose_target, compile_cuda

KNOWN = [75, 80, 86, 90, 100, 120]


def has_nvrtc() -> bool:
    try:
        compile_cuda("", (7, 5))
    except MissingDependency:
        return False
    except CudaError:
        return True
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")


def test_a_known_architecture_gets_its_own_machine_code() -> None:
    assert choose_target((9, 0), KNOWN) == ("sm_90", "CUBIN")


def test_an_architecture_between_the_known_gets_ptx_of_the_one_before() -> None:
    assert choose_target((8, 9), KNOWN) == ("compute_86", "PTX")


def test_an_architecture_newer_than_the_known_gets_ptx_of_the_newest() -> None:
    assert choose_target((13, 1), KNOWN) == ("compute_120", "PTX")


def test_an_architecture_older_than_the_known_is_refused_with_both() -> None:
    with pytest.raises(CudaError, match=r"sm_75 and newer.*sm_70"):
        choose_target((7, 0), KNOWN)


@needs_nvrtc
def test_a_source_becomes_machine_code() -> None:
    assert compile_cuda(SOURCE, (9, 0)).startswith(b"\x7fELF")


@needs_nvrtc
def test_for_an_unknown_architecture_a_source_becomes_ptx() -> None:
    assert b".visible .entry add" in compile_cuda(SOURCE, (99, 0))


@needs_nvrtc
def test_a_source_that_does_not_compile_is_refused_with_the_log() -> None:
    with pytest.raises(CudaError) as caught:
        compile_cuda("\n\n__global__ void broken() { missing(); }", (9, 0))

    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert "sm_90" in caught.value.message
    assert 'kernels.cu(3): error: identifier "missing" is undefined' in caught.value.message


@needs_nvrtc
def test_options_reach_the_compiler() -> None:
    source = "#ifndef WANTED\n#error not defined\n#endif\n"

    compile_cuda(source, (9, 0), options=["-DWANTED"])
    with pytest.raises(CudaError, match="not defined"):
        compile_cuda(source, (9, 0))


@pytest.mark.skipif(has_nvrtc(), reason="needs a machine without NVRTC")
def test_without_nvrtc_the_hint_is_the_command_that_installs_it() -> None:
    with pytest.raises(MissingDependency) as caught:
        compile_cuda(SOURCE, (9, 0))
    assert caught.value.hint.startswith("pip install 'nvidia-cuda-nvrtc")
