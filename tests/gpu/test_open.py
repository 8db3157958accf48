from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.errors import GpuUnavailable, UsageError
from cudakit.gpu.open import open_gpu

without_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:1", "auto:h200", "h200", "SIM"])
def test_unknown_gpu_error_lists_names(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)) as caught:
        open_gpu(name)
    assert all(word in caught.value.hint for word in ("auto", "cuda", "sim:MODEL"))


@without_gpu
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_missing_driver_hints_at_installation_and_not_at_options(name: str) -> None:
    with pytest.raises(GpuUnavailable, match="no CUDA driver found: libcuda") as caught:
        open_gpu(name)
    assert "install the NVIDIA driver" in caught.value.hint
    assert "--gpu sim" not in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_real_device_is_opened_if_present(name: str) -> None:
    gpu = open_gpu(name)
    assert not gpu.simulated
    gpu.close()


@pytest.mark.parametrize("name", ["sim", "sim:h200"])
def test_simulated_device_is_opened_by_name(name: str) -> None:
    gpu = open_gpu(name)
    assert gpu.simulated
    gpu.close()
