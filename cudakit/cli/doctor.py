"""``cudakit doctor``: diagnose the CUDA set-up and GPU health."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import OutputOptions, gpu_option, output_options
from cudakit.cli.output import open_output
from cudakit.cli.progress import progress_line

if TYPE_CHECKING:
    from cudakit.core.devices.diagnose.redact import Identity
    from cudakit.gpu.api.facts import Machine
    from cudakit.gpu.api.run_context import RunContext, SelfTestStep
    from cudakit.units import Unavailable


def _ids(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Parse ``CK005,ck012`` as ids."""
    parts = text if isinstance(text, tuple) else text.split(",")
    return tuple(part.strip().upper() for part in parts if part.strip())


@click.command()
@click.option("--only", type=_ids, default=(), metavar="ID,...", help="Make these checks only.")
@click.option("--skip", type=_ids, default=(), metavar="ID,...", help="Leave these checks out.")
@click.option("--explain", "explained", metavar="ID", help="Say what a check looks at and why.")
@click.option(
    "--deep",
    is_flag=True,
    help="Use each GPU for a moment as well: a context, NVRTC, a kernel, copies.",
)
@click.option(
    "--report",
    "for_others",
    is_flag=True,
    help="Write a report to paste: versions, GPUs, all evidence; without UUIDs, serial numbers, "
    "host, user and home directories.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@gpu_option
@output_options
def doctor(
    *,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    explained: str | None,
    deep: bool,
    for_others: bool,
    strict: bool,
    gpu: str,
    output: OutputOptions,
) -> int:
    """Say why CUDA does not work here, or not well, and what to do about it.

    Looks at driver, libraries, packages, environment, containers and the health of GPUs; needs no driver,
    no root and no framework, and changes nothing. Exits with 1 where a check failed.

    \b
    cudakit doctor
    cudakit doctor --deep --strict
    cudakit doctor --explain CK005
    cudakit doctor --report -o report.txt
    """
    if explained is not None:
        return _explain(explained.strip().upper(), output)
    from cudakit.core.devices.diagnose import diagnose, present, refuse_unknown
    from cudakit.core.devices.diagnose.redact import redacted

    refuse_unknown(only, skip, deep=deep)
    with open_output(output.path, force=output.force) as target:
        from cudakit.gpu.machine import open_machine

        machine = open_machine(gpu)
        # Imported while the child process queries the driver.
        from cudakit.gpu.run_context import gather_all

        context = gather_all(
            machine,
            variables=dict(os.environ),
            search_path=sys.path,
            self_test=_run_self_test(machine, quiet=output.quiet) if deep else (),
        )
        result = diagnose(context, only=only, skip=skip, deep=deep)
        if for_others:
            result = redacted(result, _identity(context))
        layout = present.paste if for_others else present.report
        target.answer(result, lambda: layout(result), as_json=output.json)
    wrong = result.failures or (strict and result.warnings)
    return ExitCode.FINDINGS if wrong else ExitCode.OK


def _explain(name: str, options: OutputOptions) -> int:
    from cudakit.core.devices.diagnose import explain, present

    explained = explain(name)
    with open_output(options.path, force=options.force) as target:
        target.answer(explained, lambda: present.explanation(explained), as_json=options.json)
    return ExitCode.OK


def _run_self_test(machine: Machine, *, quiet: bool) -> tuple[SelfTestStep, ...] | Unavailable:
    from cudakit.gpu.selftest import run_self_test
    from cudakit.units import Unavailable

    if machine.simulated:
        return Unavailable("the GPU is simulated")
    with progress_line(quiet=quiet) as progress:
        progress("using the GPU for a moment", 0.0)
        return run_self_test()


def _identity(context: RunContext) -> Identity:
    import getpass
    import platform

    from cudakit.core.devices.diagnose.redact import Identity

    serials = (device.fields.get("serial") for device in context.nvml_devices)
    return Identity(
        hostname=platform.node(),
        user=getpass.getuser(),
        home=str(Path.home()),
        serials=tuple(serial for serial in serials if isinstance(serial, str)),
    )
