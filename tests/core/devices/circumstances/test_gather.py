from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cudakit.core.devices.circumstances import gather
from cudakit.core.devices.circumstances.files import Files
from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView, Process, Telemetry
from cudakit.units import Unavailable

GPU = DeviceFacts(0, "GPU-1", "0000:01:00.0", {})


@dataclass
class Machine:
    """A machine whose CUDA breaks when it is asked."""

    simulated: bool = False

    def nvml(self) -> NvmlView | Unavailable:
        return NvmlView("580.159.04", "13.580.159.04", (GPU,), ())

    def cuda(self) -> CudaView | Unavailable:
        raise ZeroDivisionError("unforeseen")

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        return Telemetry(1, {"asked_of": device.index, "names": len(names)})

    def activity(self, device: DeviceFacts) -> Telemetry | Unavailable:
        return Unavailable(f"not asked for of {device.index}")

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return Unavailable(f"not asked for of {device.index}")


def test_a_look_that_breaks_harms_no_other(tmp_path: Path) -> None:
    found = gather(Machine(), environment={}, search_path=[str(tmp_path)], files=Files(tmp_path))

    assert found.cuda == Unavailable("looking failed: ZeroDivisionError: unforeseen")
    assert isinstance(found.nvml, NvmlView)
    assert found.telemetry == (Telemetry(1, {"asked_of": 0, "names": 0}),)
    assert found.distributions == ()


def test_a_simulated_machine_stays_one() -> None:
    found = gather(
        Machine(simulated=True), environment={"A": "1"}, search_path=[], files=Files(None)
    )

    assert found.simulated
    assert found.environment == {"A": "1"}
    assert isinstance(found.kernel_log, Unavailable)
    assert found.libraries == ()
