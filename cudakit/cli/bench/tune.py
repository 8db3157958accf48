"""``cudakit bench gemm --tune`` and ``--tuned``: search faster algorithms, and use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import opened_gpu
from cudakit.cli.bench.options import given
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import FILE, OutputOptions, grouped, option, option_group
from cudakit.cli.output import open_output, printable
from cudakit.cli.report import COMMON_FORMATS, Report, format_of, open_outputs
from cudakit.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from cudakit.core.bench.spec import GemmSpec
    from cudakit.core.bench.tuning.search import Limits
    from cudakit.core.bench.tuning.torch_csv import TorchCsv
    from cudakit.core.bench.tuning.tuned import Tuned
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
    from cudakit.gpu.api.run_context import RunContext

_OPTIONS = option_group(
    "Tuning",
    option(
        "--tune",
        "wanted",
        is_flag=True,
        help="Search for the fastest algorithm of each product instead; -o tuned.json keeps them.",
    ),
    option(
        "--tune-time",
        "time_s",
        type=float,
        metavar="SEC",
        help="Search for about SEC for each product; 30 if not given.",
    ),
    option(
        "--tune-iterations",
        "iterations",
        type=int,
        metavar="N",
        help="Take at most N samples of each algorithm; 100 if not given.",
    ),
    option(
        "--tuned",
        "known",
        type=FILE,
        metavar="FILE",
        help="Use the algorithms that --tune found. With --tune, keep them and search for the others.",
    ),
    option(
        "--export",
        "export",
        type=FILE,
        metavar="FILE.csv",
        help="Write what --tune found for torch.cuda.tunable as well (experimental; torch 2.15 and newer).",
    ),
    option(
        "--torch-validators",
        "validators",
        type=FILE,
        metavar="FILE",
        help="Take the Validator lines of --export from a file that torch wrote, not from the torch here.",
    ),
)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of tuning."""

    wanted: bool  # search
    time_s: float | None
    iterations: int | None
    known: str | None  # a tuning to continue or to use
    export: str | None  # a file for torch
    validators: str | None  # a file of torch

    def __post_init__(self) -> None:
        """Raise UsageError for options of tuning without --tune."""
        for name, value in (
            ("--tune-time", self.time_s),
            ("--tune-iterations", self.iterations),
            ("--export", self.export),
        ):
            if value is not None and not self.wanted:
                raise UsageError(f"{name} needs --tune", hint="add --tune")
        if self.validators and not self.export:
            raise UsageError("--torch-validators needs --export", hint="add --export FILE.csv")

    def limits(self) -> Limits:
        """Return the limits of the search. Raises InputError for invalid ones."""
        from cudakit.core.bench.tuning.search import Limits

        return Limits(**given(time_s=self.time_s, iterations=self.iterations))


def tune_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of tuning to a command; passed as ``tuning: TuneOptions``."""
    return grouped("tuning", TuneOptions, _OPTIONS, command)


def use_tuned(spec: GemmSpec, path: str, gpu: str) -> GemmSpec:
    """Return a Spec that uses the algorithms of ``--tuned``."""
    _check_library(spec)
    return replace(spec, algorithms=tuned_algorithms(path, gpu, spec.gemms, spec.settings))


def _check_library(spec: GemmSpec) -> None:
    """Raise UsageError for another library, whatever the file contains."""
    if spec.library != "cublaslt":
        raise UsageError(
            f"--tuned is of algorithms of cublaslt, and {spec.library} is to be measured",
            hint="leave out --library",
        )


def tuned_algorithms(
    path: str, gpu: str, gemms: Collection[Gemm], settings: GemmSettings
) -> Mapping[Gemm, Algorithm]:
    """Read the algorithms of ``--tuned`` for a GPU; those found under other settings are left out.

    Says of which of the products the file has nothing. Opens the device for a moment. Raises InputError
    where they were tuned on an unlike machine.
    """
    from cudakit.core.bench.tuning.tune import tuning_machine
    from cudakit.core.bench.tuning.tuned import load_tuned

    known = load_tuned(Path(path))
    with opened_gpu(gpu, quiet=True) as (device, _, run_context):
        machine = tuning_machine(device, run_context)
    found = known.products_on(machine)
    _say_missing(path, sum((gemm, settings) not in found for gemm in gemms), len(gemms))
    return known.algorithms_for(machine, settings)


def _say_missing(path: str, missing: int, asked: int) -> None:
    if missing:
        click.echo(
            f"cudakit: {printable(path)} has nothing for {missing} of the {asked} products under"
            " these settings: the library chooses their algorithms",
            err=True,
        )


def tune(spec: GemmSpec, gpu: str, output: OutputOptions, tuning: TuneOptions) -> ExitCode:
    """Tune the GEMMs of a Spec, and write the report and the file for torch."""
    limits = tuning.limits()
    with open_outputs(output, COMMON_FORMATS) as outputs, ExitStack() as stack:
        export = None
        if tuning.export is not None:
            format_of(tuning.export, ("csv",))
            export = stack.enter_context(open_output(tuning.export, force=output.force))
        tuned, exported = _search(spec, gpu, limits, tuning, quiet=output.quiet)
        if export and exported:
            export.write(exported.text)
        stack.close()
        outputs.write(_report(tuned, output, exported))
        if export and not output.quiet:
            click.echo(f"Wrote {printable(export.name)}", err=True)
    return _exit_code(tuned)


def _search(
    spec: GemmSpec, gpu: str, limits: Limits, tuning: TuneOptions, *, quiet: bool
) -> tuple[Tuned, TorchCsv | None]:
    from cudakit.core.bench.tuning.torch_csv import torch_csv
    from cudakit.core.bench.tuning.tune import tune as search
    from cudakit.core.bench.tuning.tuned import load_tuned

    known = load_tuned(Path(tuning.known)) if tuning.known else None
    with opened_gpu(gpu, quiet=quiet) as (device, progress, run_context):
        # An export that is impossible is reported before the long search.
        validators = _validators(tuning, device, run_context) if tuning.export else None
        tuned = search(spec, device, limits, progress, known=known, run_context=run_context)
    return tuned, torch_csv(tuned, validators) if validators else None


def _validators(tuning: TuneOptions, device: Gpu, run_context: RunContext) -> Mapping[str, str]:
    from cudakit.core.bench.tuning.torch_csv import check_validators, read_validators
    from cudakit.core.bench.tuning.tune import tuning_machine

    if device.simulated:
        raise UsageError(
            "algorithms of a simulated GPU are of no use to torch", hint="leave out --export"
        )
    found = read_validators(Path(tuning.validators)) if tuning.validators else _of_torch()
    check_validators(found, tuning_machine(device, run_context))
    return found


def _of_torch() -> Mapping[str, str]:
    from cudakit.gpu.blas.vendor import torch_validators

    try:
        return torch_validators()
    except MissingDependency as missing:
        missing.hint += ", or --torch-validators FILE with a file that torch.cuda.tunable wrote"
        raise


def _report(tuned: Tuned, output: OutputOptions, exported: TorchCsv | None) -> Report:
    from cudakit.core.bench.tuning.present import present_tuned

    kept = [target.path for target in output.targets if target.path.lower().endswith(".json")]
    return Report(
        result=tuned, document=lambda: present_tuned(tuned, files=kept, exported=exported)
    )


def _exit_code(tuned: Tuned) -> ExitCode:
    """Return FINDINGS if the library's own choice was wrong."""
    wrong = any(one.wrong for one in tuned.untuned)
    if wrong or any(not product.verification.passed for product in tuned.products):
        return ExitCode.FINDINGS
    return ExitCode.OK if tuned.complete else ExitCode.INTERRUPTED
