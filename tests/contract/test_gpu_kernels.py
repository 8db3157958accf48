from __future__ import annotations

import numpy as np
import pytest
from contract.workbench import ONE_THREAD, Workbench, refused

from cudakit.gpu.api import LEGACY, Dim3
from cudakit.gpu.driver_errors import Status


def test_kernel_runs_in_every_thread_of_grid(bench: Workbench) -> None:
    values = np.arange(1000, dtype=np.int32)
    ptr = bench.gpu.malloc(values.nbytes)
    bench.write(ptr, values)

    bench.add(ptr, 999, 5)

    assert bench.read(ptr, 1000) == [*(values[:999] + 5), 999]


def test_kernel_arguments_of_every_width_arrive(bench: Workbench) -> None:
    device_memory = bench.gpu.malloc(48)
    args = (
        np.int8(-3),
        np.int16(-300),
        np.int32(-70_000),
        np.int64(-(1 << 40)),
        np.float32(0.5),
        np.float64(0.1),
    )

    bench.launch("gather", device_memory, *args)

    values = np.frombuffer(bench.read_bytes(device_memory, 48), np.float64)
    assert values.tolist() == [-3.0, -300.0, -70_000.0, -float(1 << 40), 0.5, 0.1]


def test_kernel_arguments_are_copied_at_launch(bench: Workbench) -> None:
    stream, values = bench.gpu.stream(), [bench.ints(0) for _ in range(50)]
    bench.spin(stream)
    for index, value in enumerate(values):
        bench.store(value, index, stream)

    assert [bench.read(value)[0] for value in values] == list(range(50))


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), ONE_THREAD),
        (ONE_THREAD, (1, 0, 1)),
        ((-1, 1, 1), ONE_THREAD),
        (ONE_THREAD, (1025, 1, 1)),
        (ONE_THREAD, (32, 32, 2)),
        (ONE_THREAD, (1, 1, 65)),
        ((1, 65536, 1), ONE_THREAD),
        ((1 << 31, 1, 1), ONE_THREAD),
        ((1 << 40, 1, 1), ONE_THREAD),
    ],
)
def test_invalid_launch_shape_is_rejected(bench: Workbench, grid: Dim3, block: Dim3) -> None:
    value = bench.ints(1)

    with refused(Status.INVALID_VALUE) as caught:
        bench.launch("store", value, np.int32(2), grid=grid, block=block)
    assert str(grid) in caught.value.message
    assert str(block) in caught.value.message
    assert bench.read(value) == [1]


def test_more_shared_memory_than_there_is_is_refused(bench: Workbench) -> None:
    args = (bench.ints(1), np.int32(2))

    with refused(Status.INVALID_VALUE):
        bench.gpu.launch(
            bench.kernels["store"], ONE_THREAD, ONE_THREAD, args, LEGACY, shared_bytes=1 << 30
        )


def test_shared_memory_above_default_is_opted_in(
    bench: Workbench,
) -> None:
    value = bench.ints(1)
    args = (value, np.int32(2))

    # Every device of compute capability 7.5 and newer has 64 KiB of shared memory, minus static and reserved
    # memory.
    bench.gpu.launch(
        bench.kernels["store"], ONE_THREAD, ONE_THREAD, args, LEGACY, shared_bytes=60 << 10
    )

    assert bench.read(value) == [2]


def test_mismatched_kernel_arguments_are_rejected(bench: Workbench) -> None:
    value = bench.ints(1)

    for args in ((), (value,), (value, np.int32(1), np.int32(1))):
        with refused(Status.INVALID_VALUE) as caught:
            bench.launch("store", *args)
        assert "store" in caught.value.message


def test_unknown_kernel_name_is_in_error(bench: Workbench) -> None:
    with refused(Status.NOT_FOUND) as caught:
        bench.gpu.kernel(bench.module, "subtract")
    assert "subtract" in caught.value.message


def test_unloaded_module_and_its_kernels_are_invalid(bench: Workbench) -> None:
    bench.gpu.unload(bench.module)

    with refused(Status.INVALID_HANDLE):
        bench.gpu.unload(bench.module)
    with refused(Status.INVALID_HANDLE):
        bench.gpu.kernel(bench.module, "store")
    with refused(Status.INVALID_HANDLE):
        bench.spin(LEGACY)
