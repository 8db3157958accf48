from __future__ import annotations

from typing import Any

import click
import pytest
from invocation import Cli

from cudakit.cli.options import byte_size, output_options, percent
from cudakit.cli.output import OutputOptions, Target
from cudakit.gpu.machine import models


@click.command
@click.option("--limit", type=byte_size)
@click.option("--growth", type=percent)
@output_options(("json", "html"))
def probe(**values: Any) -> dict[str, Any]:
    return values


def parsed(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = probe.main(list(arguments), standalone_mode=False)
    return values


def test_output_options_are_passed_as_one_value() -> None:
    assert parsed()["output"] == OutputOptions(
        json=False, targets=(), force=False, quiet=False, formats=("json", "html")
    )
    assert parsed("--json", "-o", "x.json", "-o", "y.html", "-f", "-q")["output"] == OutputOptions(
        json=True,
        targets=(Target("x.json"), Target("y.html")),
        force=True,
        quiet=True,
        formats=("json", "html"),
    )
    assert parsed("--output", "-", "--force", "--quiet")["output"].targets == (Target("-"),)


def test_help_names_each_simulated_machine(cli: Cli) -> None:
    help_text = cli("devices", "--help").stdout
    assert [model for model in models() if model not in help_text] == []


def test_json_and_a_report_on_standard_output_exclude_each_other() -> None:
    with pytest.raises(click.UsageError, match="both write to standard output"):
        parsed("--json", "-o", "-")


def test_json_and_a_report_of_run_exclude_each_other_before_the_start(cli: Cli) -> None:
    done = cli("run", "--sanitize", "--json", "-o", "-", "-c", "print('started')")
    assert (done.exit_code, done.stdout) == (125, "")
    assert "--json and -o - both write to standard error" in done.stderr
    assert '"hint": "see cudakit run --help"' in done.stderr


def test_hint_of_an_error_before_the_start_names_the_help_of_run(cli: Cli) -> None:
    done = cli("run", "--sanitize", "-m", "-c", "print('started')")
    assert (done.exit_code, done.stdout) == (125, "")
    assert "hint: see cudakit run --help" in done.stderr


def test_size_is_read_as_bytes() -> None:
    assert parsed("--limit", "10GiB")["limit"] == 10 * 1024**3


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("150 %", 1.5)])
def test_percentage_is_read_as_a_share(text: str, share: float) -> None:
    assert parsed("--growth", text)["growth"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--limit", "lots"), "'lots' is not a size"),
        (("--growth", "much"), "'much' is not a percentage"),
        (("--growth", "5"), "could mean 5% or 500%"),
    ],
)
def test_value_without_unit_is_a_usage_error_with_an_example(
    arguments: tuple[str, str], reason: str
) -> None:
    with pytest.raises(click.BadParameter, match=reason) as refused:
        parsed(*arguments)

    assert refused.value.param is not None
    assert refused.value.param.opts == [arguments[0]]


def test_help_breaks_no_name_at_its_hyphen(cli: Cli) -> None:
    lines = cli("bench", "launch", "--help").stdout.splitlines()

    assert not [line for line in lines if line.endswith("-")]
