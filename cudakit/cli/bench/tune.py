"""``cudakit bench gemm --tune`` and ``--tuned``: find faster algorithms, and use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import opened_gpu
from cudakit.cli.bench.options import passed_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import FILE, Seconds, collect_options, option, option_group
from cudakit.cli.output import (
    COMMON_FORMATS,
    OutputOptions,
    Report,
    format_of,
    open_file,
    open_outputs,
    printable,
)
from cudakit.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from cudakit.bench.gemm import GemmSpec
    from cudakit.bench.tuning.search import Limits
    from cudakit.bench.tuning.tuned import TorchCsv, Tuned
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.facts import RunContext
    from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings

_OPTIONS = option_group(
    "Tuning",
    option(
        "--tune",
        "search",
        is_flag=True,
        help="Find the fastest cuBLASLt algorithm of each GEMM. -o tuned.json saves the algorithms.",
    ),
    option(
        "--tune-time",
        "time_s",
        type=Seconds(),
        metavar="SEC",
        help="Search for about SEC seconds per GEMM.  [default: 30]",
    ),
    option(
        "--tune-iterations",
        "iterations",
        type=int,
        metavar="N",
        help="Maximum number of samples per algorithm, at least 20.  [default: 100]",
    ),
    option(
        "--tuned",
        "tuned_path",
        type=FILE,
        metavar="FILE",
        help="Use the algorithms in FILE, which --tune wrote. With --tune, search only GEMMs that FILE "
        "lacks.",
    ),
    option(
        "--export",
        "export_path",
        type=FILE,
        metavar="FILE.csv",
        help="Also write the algorithms for torch.cuda.tunable (experimental; torch 2.15 or newer).",
    ),
    option(
        "--torch-validators",
        "validators_path",
        type=FILE,
        metavar="FILE",
        help="With --export: take the Validator lines from FILE, which torch.cuda.tunable wrote, not from "
        "the installed torch.",
    ),
)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of tuning."""

    search: bool  # whether --tune was given
    time_s: float | None
    iterations: int | None
    tuned_path: str | None  # file of --tuned, which has tuned algorithms
    export_path: str | None  # file for torch.cuda.tunable
    validators_path: str | None  # file that torch.cuda.tunable wrote

    def __post_init__(self) -> None:
        """Raise UsageError for options of tuning without --tune."""
        for name, value in (
            ("--tune-time", self.time_s),
            ("--tune-iterations", self.iterations),
            ("--export", self.export_path),
        ):
            if value is not None and not self.search:
                raise UsageError(f"{name} needs --tune", hint="add --tune")
        if self.validators_path and not self.export_path:
            raise UsageError("--torch-validators needs --export", hint="add --export FILE.csv")

    def limits(self) -> Limits:
        """Return the limits of the search. Raises InputError for invalid values."""
        from cudakit.bench.tuning.search import Limits

        return Limits(**passed_options(time_s=self.time_s, iterations=self.iterations))


def tune_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of tuning to a command; passed as ``tuning: TuneOptions``."""
    return collect_options("tuning", TuneOptions, _OPTIONS, command)


def use_tuned(spec: GemmSpec, path: str, gpu: str) -> GemmSpec:
    """Return a Spec that uses the algorithms in the file of ``--tuned``."""
    if spec.library != "cublaslt":
        raise UsageError(
            f"--tuned has algorithms of cublaslt and cannot be used with --library {spec.library}",
            hint="remove --library",
        )
    return replace(spec, algorithms=tuned_algorithms(path, gpu, spec.gemms, spec.settings))


def tuned_algorithms(
    path: str, gpu: str, gemms: Collection[Gemm], settings: GemmSettings
) -> Mapping[Gemm, Algorithm]:
    """Return the algorithms in the file of ``--tuned`` by GEMM, and warn about GEMMs without an algorithm.

    Opens the device to compare it with the device of the tuning. Raises InputError if the devices differ.
    """
    from cudakit.bench.tuning.tune import tuning_machine
    from cudakit.bench.tuning.tuned import load_tuned

    earlier_tuning = load_tuned(Path(path))
    with opened_gpu(gpu, quiet=True) as (device, _, run_context):
        machine = tuning_machine(device, run_context)
    tuned_gemms = earlier_tuning.results_for(machine)
    algorithms = earlier_tuning.algorithms_for(machine, settings)
    count_by_source = Counter(
        "a faster algorithm than the default"
        if gemm in algorithms
        else "no algorithm faster than the default"
        if (gemm, settings) in tuned_gemms
        else "no algorithm with these settings"
        for gemm in gemms
    )
    for source, count in count_by_source.items():
        gemms_text = f"{count} GEMM{'s' if count > 1 else ''}"
        default_text = "" if source.startswith("a faster") else "; the default is used"
        click.echo(
            f"cudakit: {printable(path)} has {source} for {gemms_text}{default_text}", err=True
        )
    return algorithms


def tune(spec: GemmSpec, gpu: str, output: OutputOptions, tune_options: TuneOptions) -> ExitCode:
    """Tune the GEMMs of a Spec, and write the report and the file for torch."""
    from cudakit.bench.tuning.tuned import load_tuned

    limits = tune_options.limits()
    with open_outputs(output, COMMON_FORMATS) as outputs, ExitStack() as stack:
        export_file = None
        if tune_options.export_path is not None:
            format_of(tune_options.export_path, ("csv",))
            export_file = stack.enter_context(
                open_file(tune_options.export_path, force=output.force)
            )
        tuned_path = tune_options.tuned_path
        earlier_tuning = load_tuned(Path(tuned_path)) if tuned_path else None
        tuned, torch_csv = _search(
            spec, gpu, limits, tune_options, earlier_tuning, quiet=output.quiet
        )
        if export_file and torch_csv:
            export_file.write(torch_csv.text)
        stack.close()
        outputs.write(_report(tuned, output, torch_csv, earlier_tuning))
        if export_file and not output.quiet:
            click.echo(f"Wrote {printable(export_file.name)}", err=True)
    return _exit_code(tuned)


def _search(
    spec: GemmSpec,
    gpu: str,
    limits: Limits,
    tune_options: TuneOptions,
    earlier_tuning: Tuned | None,
    *,
    quiet: bool,
) -> tuple[Tuned, TorchCsv | None]:
    from cudakit.bench.tuning.tune import tune as search
    from cudakit.bench.tuning.tuned import torch_csv

    with opened_gpu(gpu, quiet=quiet) as (device, progress, run_context):
        # The validators are checked before the long search, so that an impossible export is reported at once.
        validators = (
            _validators(tune_options, device, run_context) if tune_options.export_path else None
        )
        tuned = search(
            spec, device, limits, progress, earlier_tuning=earlier_tuning, run_context=run_context
        )
    return tuned, torch_csv(tuned, validators) if validators else None


def _validators(
    tune_options: TuneOptions, device: Gpu, run_context: RunContext
) -> Mapping[str, str]:
    from cudakit.bench.tuning.tune import tuning_machine
    from cudakit.bench.tuning.tuned import check_validators, read_validators

    if device.simulated:
        raise UsageError(
            "torch cannot use the algorithms of a simulated GPU", hint="remove --export"
        )
    accepted_validators = (
        read_validators(Path(tune_options.validators_path))
        if tune_options.validators_path
        else _installed_validators()
    )
    check_validators(accepted_validators, tuning_machine(device, run_context))
    return accepted_validators


def _installed_validators() -> Mapping[str, str]:
    from cudakit.gpu.vendor import torch_validators

    try:
        return torch_validators()
    except MissingDependency as error:
        error.hint += ", or add --torch-validators FILE with a file of torch.cuda.tunable"
        raise


def _report(
    tuned: Tuned,
    output: OutputOptions,
    torch_csv: TorchCsv | None,
    earlier_tuning: Tuned | None,
) -> Report:
    from cudakit.bench.tuning.tuned import present_tuned

    json_paths = [target.path for target in output.targets if target.path.lower().endswith(".json")]
    return Report(
        result=tuned,
        document=lambda: present_tuned(
            tuned, files=json_paths, torch_csv=torch_csv, earlier_tuning=earlier_tuning
        ),
    )


def _exit_code(tuned: Tuned) -> ExitCode:
    """Return FINDINGS if a default algorithm computes wrong values."""
    has_wrong_values = any(gemm.wrong for gemm in tuned.untuned)
    if has_wrong_values or any(not tuned_gemm.verification.passed for tuned_gemm in tuned.gemms):
        return ExitCode.FINDINGS
    return ExitCode.OK if tuned.complete else ExitCode.INTERRUPTED
