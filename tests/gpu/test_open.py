from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.gpu.open import open_gpu

without_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:1", "auto:h200", "h200", "SIM"])
def test_another_name_is_a_usage_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)) as caught:
        open_gpu(name)
    assert all(word in caught.value.hint for word in ("auto", "cuda", "sim:MODEL"))


@without_gpu
def test_auto_without_a_gpu_simulates_nothing_and_says_how_to() -> None:
    with pytest.raises(EnvironmentUnusable) as caught:
        open_gpu("auto")
    assert "--gpu sim" in caught.value.hint
    assert caught.value.exit_code == 3


@without_gpu
def test_cuda_without_a_driver_says_what_to_install() -> None:
    with pytest.raises(EnvironmentUnusable, match="libcuda") as caught:
        open_gpu("cuda")
    assert "driver" in caught.value.hint
    assert "--gpu sim" not in caught.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_the_real_device_is_opened_where_there_is_one(name: str) -> None:
    gpu = open_gpu(name)
    assert not gpu.simulated
    gpu.close()


@pytest.mark.parametrize("name", ["sim", "sim:h200"])
def test_the_simulated_device_is_opened_by_its_name(name: str) -> None:
    gpu = open_gpu(name)
    assert gpu.simulated
    gpu.close()
