from __future__ import annotations

from dataclasses import replace

from devices.machines import (
    NO_CUDA,
    NO_NVML,
    FakeMachine,
    cuda,
    cuda_gpu,
    gpu,
    nvml,
    read_devices,
)

from cudakit.devices.result import Pair
from cudakit.gpu.api.facts import CudaView, Link
from cudakit.units import Unavailable


def link(first: int, second: int, *, path: str = "NV18", access: str = "ok") -> Link:
    return Link(first, second, path, 18, access, access, access)


def pairs(view: CudaView | Unavailable, *links: Link, gpus: int = 2) -> tuple[Pair, ...]:
    known = nvml(*map(gpu, range(gpus)), links=links)
    return read_devices(FakeMachine(known, view), topology=True).pairs or ()


def test_pair_has_link_of_nvml_and_access_of_cuda() -> None:
    # CUDA numbers them the other way round.
    view = cuda(
        cuda_gpu(0, 1), cuda_gpu(1, 0), peer_access=((0, 1), (1, 0)), peer_atomics=((0, 1), (1, 0))
    )
    (pair,) = pairs(view, link(0, 1))

    assert (pair.first, pair.second, pair.path, pair.nvlinks) == (0, 1, "NV18", 18)
    assert (pair.cuda_access, pair.cuda_atomics, pair.disagreement) == (True, True, None)


def test_peer_access_in_one_direction_is_no_access() -> None:
    (pair,) = pairs(cuda(cuda_gpu(0, 0), cuda_gpu(1, 1), peer_access=((0, 1),)), link(0, 1))

    assert pair.cuda_access is False


def test_disagreement_nvml_reports_access_and_cuda_does_not() -> None:
    (pair,) = pairs(cuda(cuda_gpu(0, 0), cuda_gpu(1, 1)), link(0, 1))

    assert pair.disagreement == ("NVML 0 and 1: NVML reports peer access, CUDA does not")


def test_disagreement_cuda_reports_access_and_nvml_does_not() -> None:
    view = cuda(cuda_gpu(0, 0), cuda_gpu(1, 1), peer_access=((0, 1), (1, 0)))
    (pair,) = pairs(view, link(0, 1, access="the chipset does not support it"))

    assert pair.disagreement is not None
    assert "CUDA reports peer access" in pair.disagreement


def test_unavailable_access_is_no_disagreement() -> None:
    for view in (NO_CUDA, cuda(cuda_gpu(0, 0))):
        (pair,) = pairs(view, link(0, 1))

        assert isinstance(pair.cuda_access, Unavailable)
        assert pair.disagreement is None


def test_hidden_gpu_has_unavailable_cuda_access() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    (pair,) = pairs(view, link(0, 1))

    assert pair.cuda_access == Unavailable("not both devices are visible to CUDA")


def test_pair_without_link_is_listed() -> None:
    first, second, third = pairs(NO_CUDA, link(0, 1), gpus=3)

    assert first.path == "NV18"
    assert second.path == third.path == Unavailable("NVML does not report it")


def test_mig_instances_are_in_no_pair() -> None:
    instance = replace(gpu(0), index=0, uuid="MIG-0", parent=0)
    view = nvml(gpu(0), instance, gpu(1), links=(link(0, 1),))

    result = read_devices(FakeMachine(view, NO_CUDA), topology=True)
    assert result.pairs is not None
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1)]


def test_pairs_are_absent_without_nvml_or_request() -> None:
    assert read_devices(FakeMachine(NO_NVML, cuda(cuda_gpu(0, 0))), topology=True).pairs == ()
    assert read_devices(FakeMachine(nvml(gpu(0)), NO_CUDA)).pairs is None
