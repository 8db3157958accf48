"""``cudakit bench gemm --tune`` and ``--tuned``: search faster algorithms, and use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import opened_gpu, rendered
from cudakit.cli.bench.options import Outputs, given
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import grouped
from cudakit.cli.output import Output, open_by_name, open_output, printable
from cudakit.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from cudakit.core.bench.spec import GemmSpec
    from cudakit.core.bench.tuning.search import Limits
    from cudakit.core.bench.tuning.torch_csv import TorchCsv
    from cudakit.core.bench.tuning.tuned import Tuned
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
    from cudakit.gpu.api.run_context import RunContext

# Formats of a tuning.
FORMATS = ("json", "md", "html")

_OPTIONS = (
    click.option(
        "--tune",
        "wanted",
        is_flag=True,
        help="Search for the fastest algorithm of each product instead; -o tuned.json keeps them.",
    ),
    click.option(
        "--tune-time",
        "time_s",
        type=float,
        metavar="SEC",
        help="Search for about SEC for each product; 30 if not given.",
    ),
    click.option(
        "--tune-iterations",
        "iterations",
        type=int,
        metavar="N",
        help="Take at most N samples of each algorithm; 100 if not given.",
    ),
    click.option(
        "--tuned",
        "known",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use the algorithms that --tune found. With --tune, keep them and search for the others.",
    ),
    click.option(
        "--export",
        "export",
        metavar="FILE.csv",
        help="Write what --tune found for torch.cuda.tunable as well (experimental; torch 2.15 and newer).",
    ),
    click.option(
        "--torch-validators",
        "validators",
        type=click.Path(path_type=Path),
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
    known: Path | None  # a tuning to continue or to use
    export: str | None  # a file for torch
    validators: Path | None  # a file of torch

    def __post_init__(self) -> None:
        """Raise UsageError for options of tuning without --tune."""
        for option, value in (
            ("--tune-time", self.time_s),
            ("--tune-iterations", self.iterations),
            ("--export", self.export),
        ):
            if value is not None and not self.wanted:
                raise UsageError(f"{option} is of no use without --tune", hint="add --tune")
        if self.validators and not self.export:
            raise UsageError(
                "--torch-validators is of no use without --export", hint="add --export FILE.csv"
            )

    @property
    def exports(self) -> tuple[str, ...]:
        """The file for torch, if any."""
        return () if self.export is None else (self.export,)

    def limits(self) -> Limits:
        """Return the limits of the search. Raises InputError for invalid ones."""
        from cudakit.core.bench.tuning.search import Limits

        return Limits(**given(time_s=self.time_s, iterations=self.iterations))


def tune_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of tuning to a command; passed as ``tuning: TuneOptions``."""
    return grouped("tuning", TuneOptions, _OPTIONS, command)


def use_tuned(spec: GemmSpec, path: Path, gpu: str) -> GemmSpec:
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
    path: Path, gpu: str, gemms: Collection[Gemm], settings: GemmSettings
) -> Mapping[Gemm, Algorithm]:
    """Read the algorithms of ``--tuned`` for a GPU; those found under other settings are left out.

    Says of which of the products the file has nothing. Opens the device for a moment. Raises InputError
    where they were tuned on an unlike machine.
    """
    from cudakit.core.bench.tuning.tune import tuning_machine
    from cudakit.core.bench.tuning.tuned import load_tuned

    known = load_tuned(path)
    with opened_gpu(gpu, quiet=True) as (device, _, run_context):
        machine = tuning_machine(device, run_context)
    found = known.entries_for(machine)
    _say_missing(path, sum((gemm, settings) not in found for gemm in gemms), len(gemms))
    return known.algorithms_for(machine, settings)


def _say_missing(path: Path, missing: int, asked: int) -> None:
    if missing:
        click.echo(
            f"cudakit: {printable(str(path))} has nothing for {missing} of the {asked} products under"
            " these settings: the library chooses their algorithms",
            err=True,
        )


def tune(spec: GemmSpec, gpu: str, outputs: Outputs, tuning: TuneOptions) -> ExitCode:
    """Tune the GEMMs of a Spec, write the files, and print the report."""
    limits = tuning.limits()
    with open_output(None) as target:
        with (
            open_by_name(outputs.paths, FORMATS, force=outputs.force) as files,
            open_by_name(tuning.exports, ("csv",), force=outputs.force) as exports,
        ):
            tuned, exported = _search(spec, gpu, limits, tuning, quiet=outputs.quiet)
            for form, file in files:
                file.write(rendered(tuned, form))
            if exported:
                for _, file in exports:
                    file.write(exported.text)
        _report(target, tuned, outputs, exported)
    return _exit_code(tuned)


def _search(
    spec: GemmSpec, gpu: str, limits: Limits, tuning: TuneOptions, *, quiet: bool
) -> tuple[Tuned, TorchCsv | None]:
    from cudakit.core.bench.tuning.torch_csv import torch_csv
    from cudakit.core.bench.tuning.tune import tune as search
    from cudakit.core.bench.tuning.tuned import load_tuned

    known = load_tuned(tuning.known) if tuning.known else None
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
    found = read_validators(tuning.validators) if tuning.validators else _of_torch()
    check_validators(found, tuning_machine(device, run_context))
    return found


def _of_torch() -> Mapping[str, str]:
    from cudakit.gpu.blas.vendor import torch_validators

    try:
        return torch_validators()
    except MissingDependency as missing:
        missing.hint += ", or --torch-validators FILE with a file that torch.cuda.tunable wrote"
        raise


def _report(target: Output, tuned: Tuned, outputs: Outputs, exported: TorchCsv | None) -> None:
    from cudakit.core.bench.tuning.present import present_tuned

    kept = [path for path in outputs.paths if path.lower().endswith(".json")]
    target.answer(
        tuned,
        lambda: present_tuned(tuned, files=kept, exported=exported),
        as_json=outputs.json,
    )


def _exit_code(tuned: Tuned) -> ExitCode:
    """Return FINDINGS if the library's own choice was wrong."""
    wrong = any(one.wrong for one in tuned.untuned)
    if wrong or any(not product.verification.passed for product in tuned.products):
        return ExitCode.FINDINGS
    return ExitCode.OK if tuned.complete else ExitCode.INTERRUPTED
