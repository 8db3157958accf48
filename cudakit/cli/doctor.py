"""``cudakit doctor``: diagnose the CUDA set-up and GPU health."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudakit.cli.explain import explain_terms
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    Command,
    Value,
    gpu_option,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, Report, open_outputs, progress_line

if TYPE_CHECKING:
    from cudakit.devices.doctor.report import Identity
    from cudakit.gpu.api.facts import Machine, RunContext, SelfTestStep
    from cudakit.units import Unavailable


def _parse_ids(text: str) -> tuple[str, ...]:
    ids = tuple(id_text.strip() for id_text in text.split(",") if id_text.strip())
    if not ids:
        raise click.BadParameter("name at least one check, for example CK005")
    return ids


def _check_ids() -> list[str]:
    from cudakit.devices.doctor.checks import checks_by_id

    return [*checks_by_id()]


_CHECK_OPTIONS = option_group(
    "Checks",
    option(
        "--only",
        type=Value(_check_ids, _parse_ids, is_list=True),
        default=(),
        metavar="ID,...",
        help="Run only these checks, for example CK005,CK012.",
    ),
    option(
        "--skip",
        type=Value(_check_ids, _parse_ids, is_list=True),
        default=(),
        metavar="ID,...",
        help="Skip these checks.",
    ),
    option(
        "--deep",
        is_flag=True,
        help="Also use each GPU briefly (CK041 to CK044): create a context, compile with NVRTC, run a "
        "kernel, copy.",
    ),
    option(
        "--explain",
        "explained_id",
        type=Value(_check_ids),
        metavar="ID",
        hidden=True,  # the earlier spelling of cudakit explain
    ),
    gpu_option,
)
_RESULT_OPTIONS = option_group(
    "Result",
    option(
        "--all",
        "show_all",
        is_flag=True,
        help="Show all checks, not only the problems, and the environment variables that are set and known "
        "to cudakit.",
    ),
    option(
        "--report",
        "for_issue",
        is_flag=True,
        help="Print a report to paste into an issue: versions, GPUs and all checks with their evidence, "
        "without UUIDs, serial numbers, host name, user name and home directories.",
    ),
    option(
        "--fail-on",
        "fail_on",
        type=click.Choice(["warning"]),
        metavar="warning",
        help="Exit with 1 also if there are only warnings.",
    ),
)


@click.command(cls=Command)
@partial(with_options, (*_CHECK_OPTIONS, *_RESULT_OPTIONS))
@output_options(COMMON_FORMATS)
def doctor(
    *,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    explained_id: str | None,
    deep: bool,
    show_all: bool,
    for_issue: bool,
    fail_on: str | None,
    gpu: str,
    output: OutputOptions,
) -> int:
    """Diagnose the CUDA set-up and GPU health, and print what to do about each problem.

    Checks the driver, libraries, packages, environment variables, containers and the health of each GPU.
    Needs no driver, no root and no framework, and changes nothing. Exits with 1 if a check failed, with 3 if
    no check could be performed. With --gpu sim the whole machine is simulated: packages, environment
    variables and limits are not those of this machine.

    \b
    cudakit doctor
    cudakit doctor --all
    cudakit doctor --deep --fail-on warning
    cudakit explain CK005
    cudakit doctor --report -o report.txt
    """
    if explained_id is not None:
        if only or skip or deep or show_all or for_issue or fail_on:
            raise click.UsageError("--explain performs no check; remove the other options")
        return explain_terms((explained_id,), output, for_doctor=True)
    from cudakit.devices.doctor.checks import diagnose, selected_ids
    from cudakit.devices.doctor.report import paste_report, redact_value, report

    selected_ids(only, skip, with_self_test=deep)  # reports an unknown id before the long work
    with open_outputs(output) as outputs:
        from cudakit.gpu.machine import open_machine

        machine = open_machine(gpu)
        # This slow import runs while the child process queries the driver.
        from cudakit.gpu.run_context import gather_all

        run_context = gather_all(
            machine,
            variables=dict(os.environ),
            search_path=sys.path,
            self_test=_run_self_test(machine, quiet=output.quiet) if deep else (),
        )
        result = diagnose(run_context, only_checks=only, skipped_checks=skip, with_self_test=deep)
        if for_issue:
            result = redact_value(result, _identity(run_context))
        document = partial(report, show_all=show_all, has_selection=bool(only))
        render = paste_report if for_issue else document
        outputs.write(Report(result=result, document=lambda: render(result)))
    if result.failures or (fail_on and result.warnings):
        return ExitCode.FINDINGS
    return ExitCode.ENVIRONMENT if result.is_unknown else ExitCode.OK


def _run_self_test(machine: Machine, *, quiet: bool) -> tuple[SelfTestStep, ...] | Unavailable:
    from cudakit.gpu.selftest import run_self_test
    from cudakit.units import Unavailable

    if machine.simulated:
        return Unavailable("the GPU is simulated")
    with progress_line(quiet=quiet) as progress:
        progress("running the self-test on the GPU", 0.0)
        return run_self_test()


def _identity(context: RunContext) -> Identity:
    import getpass
    import platform

    from cudakit.devices.doctor.report import Identity

    serials = (device.fields.get("serial") for device in context.nvml_devices)
    return Identity(
        hostname=platform.node(),
        user=getpass.getuser(),
        home=str(Path.home()),
        serials=tuple(serial for serial in serials if isinstance(serial, str)),
    )
