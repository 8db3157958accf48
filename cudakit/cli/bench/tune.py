"""``cudakit bench gemm --tune`` and ``--tuned``: find faster algorithms, and use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cudakit.bench.gemm import GemmSpec
from cudakit.bench.tuning.search import Limits
from cudakit.bench.tuning.tune import tune as search_algorithms
from cudakit.bench.tuning.tune import tuning_machine
from cudakit.bench.tuning.tuned import (
    Tuned,
    check_validators,
    load_tuned,
    present_tuned,
    read_validators,
    torch_csv,
)
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
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.vendor import torch_validators

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


def tune_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of tuning to a command; passed as ``tuning: TuneOptions``."""
    return collect_options("tuning", TuneOptions, _OPTIONS, command)


def use_tuned(spec: GemmSpec, path: str, gpu: str) -> GemmSpec:
    """Return a Spec with the algorithms in the file of ``--tuned``; warn about GEMMs without an algorithm.

    Opens the device to compare it with the device of the tuning. Raises InputError if the devices differ.
    """
    if spec.library != "cublaslt":
        raise UsageError(
            f"--tuned has algorithms of cublaslt and cannot be used with --library {spec.library}",
            hint="remove --library",
        )
    earlier_tuning = load_tuned(Path(path))
    with opened_gpu(gpu, quiet=True) as (device, _, run_context):
        machine = tuning_machine(device, run_context)
    tuned_gemms = earlier_tuning.results_for(machine)
    algorithms = earlier_tuning.algorithms_for(machine, spec.settings)
    count_by_source = Counter(
        "a faster algorithm than the default"
        if gemm in algorithms
        else "no algorithm faster than the default"
        if (gemm, spec.settings) in tuned_gemms
        else "no algorithm with these settings"
        for gemm in spec.gemms
    )
    for source, count in count_by_source.items():
        gemms_text = f"{count} GEMM{'s' if count > 1 else ''}"
        default_text = "" if source.startswith("a faster") else "; the default is used"
        click.echo(
            f"cudakit: {printable(path)} has {source} for {gemms_text}{default_text}", err=True
        )
    return replace(spec, algorithms=algorithms)


def tune(spec: GemmSpec, gpu: str, output: OutputOptions, options: TuneOptions) -> ExitCode:
    """Tune the GEMMs of a Spec, and write the report and the file for torch."""
    limits = Limits(**passed_options(time_s=options.time_s, iterations=options.iterations))
    with open_outputs(output, COMMON_FORMATS) as outputs, ExitStack() as stack:
        export_file = None
        if options.export_path is not None:
            format_of(options.export_path, ("csv",))
            export_file = stack.enter_context(open_file(options.export_path, force=output.force))
        earlier_tuning = load_tuned(Path(options.tuned_path)) if options.tuned_path else None
        with opened_gpu(gpu, quiet=output.quiet) as (device, progress, run_context):
            # Checked before the long search, so that an impossible export is reported at once.
            validators = _validators(options, device, run_context) if export_file else {}
            tuned = search_algorithms(
                spec,
                device,
                limits,
                progress,
                earlier_tuning=earlier_tuning,
                run_context=run_context,
            )
        exported = torch_csv(tuned, validators) if validators else None
        if export_file and exported:
            export_file.write(exported.text)
        stack.close()
        paths = [target.path for target in output.targets]
        json_paths = [path for path in paths if path.lower().endswith(".json")]
        outputs.write(
            Report(
                result=tuned,
                document=lambda: present_tuned(
                    tuned, files=json_paths, torch_csv=exported, earlier_tuning=earlier_tuning
                ),
            )
        )
        if export_file and not output.quiet:
            click.echo(f"Wrote {printable(export_file.name)}", err=True)
    return _exit_code(tuned)


def _validators(options: TuneOptions, device: Gpu, run_context: RunContext) -> Mapping[str, str]:
    """Return the validators of the torch that will read the export. Raises UsageError, InputError."""
    if device.simulated:
        raise UsageError(
            "torch cannot use the algorithms of a simulated GPU", hint="remove --export"
        )
    if options.validators_path:
        validators = read_validators(Path(options.validators_path))
    else:
        try:
            validators = torch_validators()
        except MissingDependency as error:
            error.hint += ", or add --torch-validators FILE with a file of torch.cuda.tunable"
            raise
    check_validators(validators, tuning_machine(device, run_context))
    return validators


def _exit_code(tuned: Tuned) -> ExitCode:
    """Return FINDINGS if a default algorithm computes wrong values."""
    has_wrong_values = any(gemm.wrong for gemm in tuned.untuned)
    if has_wrong_values or any(not tuned_gemm.verification.passed for tuned_gemm in tuned.gemms):
        return ExitCode.FINDINGS
    return ExitCode.OK if tuned.complete else ExitCode.INTERRUPTED
