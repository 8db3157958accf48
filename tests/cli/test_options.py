from __future__ import annotations

from typing import Any

import click
import pytest

from cudakit.cli.options import OutputOptions, byte_size, output_options, percent


@click.command
@click.option("--limit", type=byte_size)
@click.option("--growth", type=percent)
@output_options
def probe(**values: Any) -> dict[str, Any]:
    return values


def parsed(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = probe.main(list(arguments), standalone_mode=False)
    return values


def test_the_output_options_arrive_as_one_value() -> None:
    assert parsed()["output"] == OutputOptions(json=False, path=None, force=False, quiet=False)
    assert parsed("--json", "-o", "x.json", "-f", "-q")["output"] == OutputOptions(
        json=True, path="x.json", force=True, quiet=True
    )
    assert parsed("--output", "-", "--force", "--quiet")["output"].path == "-"


def test_a_size_is_read_as_bytes() -> None:
    assert parsed("--limit", "10GiB")["limit"] == 10 * 1024**3


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("150 %", 1.5)])
def test_a_percentage_is_read_as_a_share(text: str, share: float) -> None:
    assert parsed("--growth", text)["growth"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--limit", "lots"), "not a size: 'lots'"),
        (("--growth", "much"), "not a ratio: 'much'"),
        (("--growth", "5"), "write 5% for a percentage"),
    ],
)
def test_a_value_without_its_unit_is_a_usage_error_that_shows_how(
    arguments: tuple[str, str], reason: str
) -> None:
    with pytest.raises(click.BadParameter, match=reason) as refused:
        parsed(*arguments)

    assert refused.value.param is not None
    assert refused.value.param.opts == [arguments[0]]
