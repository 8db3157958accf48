"""The options that benches share, and the parsing of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import click

from cudakit.cli.options import (
    Decorator,
    byte_size,
    grouped,
    json_option,
    percent,
    quiet_option,
    with_options,
)

# Arguments of a Spec that control precision; options that were not given are absent.
Effort: TypeAlias = dict[str, Any]

# A longer sweep is a typing error.
_MOST_SIZES = 64


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files and format of a result."""

    paths: tuple[str, ...]  # files, in the format of their suffix
    force: bool  # replace files that exist
    json: bool  # print the result as JSON instead of a report
    quiet: bool  # show no progress


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; a Spec has defaults for the others."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Parse ``read,write`` as names; the Spec validates them."""
    return tuple(dict.fromkeys(_parts(text))) if isinstance(text, str) else text


def sizes(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse ``64KiB,1MiB..1GiB`` as bytes; a range doubles."""
    if not isinstance(text, str):
        return text
    found = [size for part in _parts(text) for size in _range(part)]
    return tuple(dict.fromkeys(found))


def counts(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse ``1,10,100`` as numbers."""
    if not isinstance(text, str):
        return text
    try:
        return tuple(dict.fromkeys(map(int, _parts(text))))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no list of numbers; write for example 1,10,100"
        ) from None


def _parts(text: str) -> list[str]:
    """Split a list. An empty list may be an unset shell variable, and is an error."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise click.BadParameter(f"{text!r} lists nothing; leave it out to have the usual ones")
    return parts


def _range(text: str) -> list[int]:
    low, dots, high = text.partition("..")
    first, last = byte_size(low), byte_size(high) if dots else byte_size(low)
    if dots and not 0 < first <= last:
        raise click.BadParameter(f"{text.strip()!r} is no range; write for example 1MiB..1GiB")
    found = [first << i for i in range(_MOST_SIZES) if first << i <= last or not i]
    return found if dots else found[:1]


def sizes_option(what: str) -> Decorator:
    """Return the option ``--sizes``, passed as ``sizes_bytes``."""
    return click.option(
        "--sizes",
        "sizes_bytes",
        type=sizes,
        metavar="SIZE,...",
        help=f"{what}, as 64KiB,1MiB or doubling from 1MiB..1GiB.",
    )


def mode_option(default: str) -> Decorator:
    """Return the option ``--mode``; ``default`` is only text, the Spec applies it."""
    return click.option(
        "--mode",
        type=click.Choice(["isolated", "batch", "graph", "host"]),
        metavar="MODE",
        help="What a sample is: isolated (one execution, between two events), batch (many), graph (many, "
        f"in a graph) or host (one, by the clock of the host); {default} if not given.",
    )


def cache_option(default: str) -> Decorator:
    """Return the option ``--cache``; ``default`` is only text, the Spec applies it."""
    return click.option(
        "--cache",
        type=click.Choice(["rotate", "flush", "hot"]),
        metavar="STATE",
        help="What the L2 cache holds: rotate (other buffers in turn), flush (what overwrote it) or hot "
        f"(the data); {default} if not given.",
    )


_EFFORT = (
    click.option(
        "--precision",
        type=percent,
        metavar="RATIO",
        help="Stop when the median is known so well, with 95 % confidence; 1% if not given.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        metavar="SEC",
        help="Stop a case after SEC; 15 if not given.",
    ),
    click.option(
        "--samples", "min_samples", type=int, metavar="N", help="Take at least N; 10 if not given."
    ),
    click.option(
        "--rounds",
        type=int,
        metavar="N",
        help="Take the samples in N rounds, each with buffers of its own; 5 if not given.",
    ),
    click.option(
        "--budget", "budget_s", type=float, metavar="SEC", help="Give all cases together about SEC."
    ),
    click.option(
        "--warmup", "warmup_s", type=float, metavar="SEC", help="Warm up for at least SEC a case."
    ),
    click.option("--seed", type=int, metavar="N", help="Make the data from N; 0 if not given."),
    click.option(
        "--no-blocker", is_flag=True, help="Do not hold the stream back while work is enqueued."
    ),
)


def effort_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for precision and time to a command; passed as ``effort: Effort``."""

    @functools.wraps(command)
    def collecting(**options: Any) -> Any:
        parts = {name: options.pop(name) for name in ("warmup_s", "seed", "rounds", "budget_s")}
        limits = {name: options.pop(name) for name in ("precision", "timeout_s", "min_samples")}
        effort = given(**parts, blocker=False if options.pop("no_blocker") else None)
        return command(effort=effort | _rule(given(**limits)), **options)

    return with_options(_EFFORT, collecting)


def _rule(limits: dict[str, Any]) -> Effort:
    from cudakit.core.bench.method import Rule

    return {"rule": Rule(**limits)} if limits else {}


_OUTPUTS = (
    click.option(
        "-o",
        "--output",
        "paths",
        metavar="FILE",
        multiple=True,
        help="Write to FILE as well: .json, .csv, .md, .html or .nvbench.json. Repeatable.",
    ),
    click.option("-f", "--force", is_flag=True, help="Replace files that exist."),
    json_option,
    quiet_option,
)


def outputs_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``-o -f --json -q`` to a command; passed as ``outputs: Outputs``."""
    return grouped("outputs", Outputs, _OUTPUTS, command)
