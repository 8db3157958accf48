"""Is the memory of the GPUs whole?"""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus
from cudakit.gpu.api.run_context import RunContext

_ECC_NOW = (
    "ecc_sram_uncorrected_volatile",
    "ecc_sram_parity_volatile",
    "ecc_dram_uncorrected_volatile",
)
_ECC_EVER = (
    "ecc_sram_uncorrected_aggregate",
    "ecc_sram_parity_aggregate",
    "ecc_dram_uncorrected_aggregate",
)


def memory_errors(c: RunContext) -> Finding:
    """ECC finds errors of memory; those that it cannot correct end the programs they hit.

    Volatile counters begin when the driver is loaded, aggregate ones with the life of the GPU. An
    uncorrected error since the driver was loaded means results or programs were lost; DRAM errors are
    answered by remapping the row (CK028). GeForce cards have no ECC of their memory, or have it off.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.knows(*_ECC_NOW, *_ECC_EVER)]
    now = [gpu for gpu in gpus if _sum(gpu, _ECC_NOW)]
    ever = [gpu for gpu in gpus if _sum(gpu, _ECC_EVER) and gpu not in now]
    worn = [gpu for gpu in gpus if gpu.flag("ecc_sram_threshold_exceeded")]
    problems = []
    if worn:
        problems.append(
            fail(
                f"SRAM errors of {named(worn)} exceed the limit for replacement",
                each(worn, _ecc_counts),
                "run the vendor's field diagnostic and have it replaced",
            )
        )
    if now:
        problems.append(
            fail(
                f"{named(now)} has had memory errors that could not be corrected",
                each(now, _ecc_counts),
                "end what runs on it, then: sudo nvidia-smi --gpu-reset -i "
                + ",".join(str(gpu.facts.index) for gpu in now),
            )
        )
    if ever:
        problems.append(
            warn(
                f"{named(ever)} had uncorrected memory errors earlier in its life",
                each(ever, _ecc_counts),
                "watch whether the count grows: nvidia-smi -q -d ECC",
            )
        )
    said = (
        ok("no uncorrected memory error", each(gpus, _ecc_counts))
        if gpus
        else ok("no GPU counts memory errors (it has no ECC, or has it off)")
    )
    return together(problems, otherwise=said)


def _sum(gpu: SeenGpu, names: tuple[str, ...]) -> int:
    return int(sum(gpu.number(name) or 0 for name in names))


def _ecc_counts(gpu: SeenGpu) -> str:
    return f"{_sum(gpu, _ECC_NOW)} since the driver was loaded, {_sum(gpu, _ECC_EVER)} ever"


def memory_repairs(c: RunContext) -> Finding:
    """GPUs replace bad memory by spare rows (from Ampere on) or leave pages out (before).

    A replacement that is pending takes effect with the next reset; until then the bad memory stays in
    use. One that failed means that the spares are used up: the GPU must be replaced. The driver may also
    say outright what it needs (recovery action). NVIDIA GPU Memory Error Management.
    """
    gpus = seen_gpus(c)
    failed = [
        gpu for gpu in gpus if gpu.flag("remapped_rows_failed") or gpu.flag("unrepairable_memory")
    ]
    pending = [gpu for gpu in gpus if _pending(gpu)]
    asking = [gpu for gpu in gpus if gpu.text("recovery_action") not in (None, "none")]
    problems = []
    if failed:
        problems.append(
            fail(
                f"{named(failed)} has bad memory and no spare rows left for it",
                each(failed, _repairs),
                "have it replaced",
            )
        )
    if pending:
        problems.append(
            warn(
                f"bad memory of {named(pending)} is replaced at the next reset",
                each(pending, _repairs),
                _reset(pending),
            )
        )
    if asking:
        problems.append(
            fail(
                f"the driver asks for recovery: {asking[0].text('recovery_action')}",
                each(asking, lambda gpu: gpu.text("recovery_action")),
                _reset(asking),
            )
        )
    return together(problems, otherwise=ok("no memory waits for repair", each(gpus, _repairs)))


def _pending(gpu: SeenGpu) -> bool:
    names = ("remapped_rows_pending", "retired_pages_pending", "repair_channel_pending")
    return any(gpu.flag(name) for name in names)


def _repairs(gpu: SeenGpu) -> str | None:
    remapped = gpu.number("remapped_rows_correctable"), gpu.number("remapped_rows_uncorrectable")
    if None not in remapped:
        return f"{sum(int(rows or 0) for rows in remapped)} rows remapped"
    retired = gpu.number("retired_pages_single_bit"), gpu.number("retired_pages_double_bit")
    return None if None in retired else f"{sum(int(pages or 0) for pages in retired)} pages retired"


def _reset(gpus: list[SeenGpu]) -> str:
    numbers = ",".join(str(gpu.facts.index) for gpu in gpus)
    return f"end what runs on it, then: sudo nvidia-smi --gpu-reset -i {numbers} (or reboot)"
