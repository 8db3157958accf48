"""The options that benches share, and the parsers of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from cudakit.cli.options import (
    FILE,
    Decorator,
    Seconds,
    Value,
    byte_size,
    option,
    option_group,
    percent,
)

if TYPE_CHECKING:
    from cudakit.bench.spec import Option, Spec

_Spec = TypeVar("_Spec", bound="Spec")

_ELEMENT_UNITS = {"K": 1000, "M": 1000**2, "G": 1000**3}
_MAX_SIZES = 64  # maximum number of sizes in a range


def passed_options(**options: Any) -> dict[str, Any]:
    """Return the options that the user passed; the Spec has defaults for the others."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def parse_names(text: str) -> tuple[str, ...]:
    """Parse ``read,write`` as names; the Spec validates them."""
    return tuple(dict.fromkeys(_split_list(text)))


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``1,10,100`` as numbers."""
    try:
        return tuple(dict.fromkeys(map(int, _split_list(text))))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers; write for example 1,10,100"
        ) from None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``64KiB,1MiB..1GiB`` as bytes; the sizes of a range double, or grow by N in ``1MiB..1GiB:N``."""
    return _parse_ranges(text, byte_size, "1MiB..1GiB or 1KiB..1GiB:4")


def parse_elements(text: str) -> tuple[int, ...]:
    """Parse ``10K,1M`` or ``10K..10M:10`` as numbers of elements; K and M are powers of 1000."""
    return _parse_ranges(text, _element_count, "10K..1M or 10K..10M:10")


def _element_count(text: str) -> int:
    number, unit = text.strip(), 1
    if number and number[-1].upper() in _ELEMENT_UNITS:
        number, unit = number[:-1], _ELEMENT_UNITS[number[-1].upper()]
    if not number.isdecimal():
        raise click.BadParameter(
            f"{text.strip()!r} is not a number of elements; write for example 10K or 1M"
        )
    return int(number) * unit


def _split_list(text: str) -> list[str]:
    """Split a list. An empty list is an error: its text may come from an unset shell variable."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise click.BadParameter(f"{text!r} is an empty list; leave out the option for the default")
    return items


def _parse_ranges(text: str, parse: Callable[[str], int], example: str) -> tuple[int, ...]:
    """Return the sizes of a list of single sizes and ranges, each once. ``example`` is text for errors."""
    sizes: dict[int, None] = {}
    for item in _split_list(text):
        low_text, is_range, high_and_factor = item.partition("..")
        high_text, colon, factor_text = high_and_factor.partition(":")
        if is_range and not (low_text.strip() and high_text.strip()):
            raise click.BadParameter(
                f"the range {item!r} lacks its first or last size; write for example {example}"
            )
        size, last = parse(low_text), parse(high_text if is_range else low_text)
        factor = int(factor_text) if factor_text.isdecimal() else 0 if colon else 2
        if is_range and not 0 < size <= last:
            raise click.BadParameter(
                f"{item!r} is not an ascending range; write for example {example}"
            )
        if factor < 2:
            raise click.BadParameter(
                f"the factor of the range {item!r} is not a whole number of at least 2; write for "
                f"example {example}"
            )
        powers = (size * factor**i for i in range(_MAX_SIZES if is_range else 1))
        sizes |= dict.fromkeys(power for power in powers if power <= last)
    return tuple(sizes)


# The title of the shared options, and the help that describes them.
MEASUREMENT = "Measurement"
HELP_BY_TITLE = {MEASUREMENT: "cudakit bench --help"}

EFFORT_OPTIONS = option_group(
    MEASUREMENT,
    option(
        "--precision",
        type=percent,
        metavar="RATIO",
        help="Stop once the 95% CI half-width is below this fraction of the median.  [default: 1%; copy "
        "--overlap: 2%]",
    ),
    option(
        "--timeout",
        "timeout_s",
        type=Seconds(),
        metavar="SEC",
        help="Stop sampling a case after SEC seconds, of simulated time with --gpu sim.  [default: 15; copy "
        "--overlap: 3]",
    ),
    option(
        "--samples",
        "min_samples",
        type=int,
        metavar="N",
        help="Minimum number of samples of each case, unless the time limit ends sampling earlier.  "
        "[default: 10]",
    ),
    option(
        "--rounds",
        type=int,
        metavar="N",
        help="Spread the samples over N rounds, each with newly allocated buffers.  [default: 5; ops, nccl, "
        "gds and copy --overlap: 2; with --gpu sim always 1]",
    ),
    option(
        "--budget",
        "budget_s",
        type=Seconds(),
        metavar="SEC",
        help="Spend about SEC seconds on all cases together. After twice that time no further case begins. "
        "With --gpu sim, a case is limited in simulated seconds, which can take longer to compute.",
    ),
    option(
        "--warmup",
        "warmup_s",
        type=Seconds(),
        metavar="SEC",
        help="Warm up each case for at least SEC seconds.  [default: 0.25; gemm: 1; nccl and "
        "copy --overlap: 0.1; with --gpu sim always one sample]",
    ),
    option("--seed", type=int, metavar="N", help="Seed of the random data.  [default: 0]"),
    option(
        "--no-blocker",
        is_flag=True,
        help="Do not block the stream while work is enqueued; samples then include launch gaps.",
    ),
)


def make_spec(spec_class: type[_Spec], gpu: str, options: dict[str, Any], **given: Any) -> _Spec:
    """Return a Spec of the options of the command line; ``given`` comes from other packages."""
    passed = passed_options(**options)
    if passed.pop("no_blocker", False):
        passed["blocker"] = False
    spec = spec_class.from_options(passed | given, simulated=gpu.startswith("sim"))
    return cast(_Spec, spec)


def spec_options(spec_class: type[Spec]) -> tuple[Decorator, ...]:
    """Return the options of click for those of a Spec."""
    return tuple(_click_option(name, spec_option) for name, spec_option in spec_class.options())


def _click_option(field_name: str, spec_option: Option) -> Decorator:
    choices, kind = spec_option.choices, spec_option.kind
    types: dict[str, Any] = {
        "choice": lambda: click.Choice(choices),
        "int": lambda: int,
        "file": lambda: FILE,
        "bytes": lambda: byte_size,
        "name": lambda: Value(choices),
        "names": lambda: Value(choices, parse_names, is_list=True),
        "counts": lambda: Value(choices, parse_counts),
        "sizes": lambda: Value(choices, parse_sizes),
        "elements": lambda: Value(choices, parse_elements),
    }
    attributes: dict[str, Any] = {"is_flag": True}
    if kind != "flag":
        attributes = {"type": types[kind](), "metavar": spec_option.metavar}
    add_option = option(
        spec_option.name,
        field_name,
        help=spec_option.help,
        multiple=spec_option.is_repeatable,
        **attributes,
    )
    return option_group(spec_option.group, add_option)[0] if spec_option.group else add_option
