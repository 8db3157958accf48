"""The options that benches share, and the parsers of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


_SIZE_RANGES = "1MiB..1GiB or 1KiB..1GiB:4"
_ELEMENT_RANGES = "10K..1M or 10K..10M:10"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``64KiB,1MiB..1GiB`` as bytes; the sizes of a range double, or grow by N in ``1MiB..1GiB:N``."""
    sizes_bytes = [size for item in _split_list(text) for size in _parse_range(item)]
    return tuple(dict.fromkeys(sizes_bytes))


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``1,10,100`` as numbers."""
    try:
        return tuple(dict.fromkeys(map(int, _split_list(text))))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers; write for example 1,10,100"
        ) from None


def parse_elements(text: str) -> tuple[int, ...]:
    """Parse ``10K,1M`` or ``10K..10M:10`` as numbers of elements; K and M are powers of 1000."""
    sizes = [
        size
        for item in _split_list(text)
        for size in _parse_range(item, element_count, _ELEMENT_RANGES)
    ]
    return tuple(dict.fromkeys(sizes))


def element_count(text: str) -> int:
    """Parse ``10K`` as a number of elements. Raises click.BadParameter for other texts."""
    number_text, unit = text.strip(), 1
    if number_text and number_text[-1].upper() in _ELEMENT_UNITS:
        number_text, unit = number_text[:-1], _ELEMENT_UNITS[number_text[-1].upper()]
    if not number_text.isdecimal():
        raise click.BadParameter(
            f"{text.strip()!r} is not a number of elements; write for example 10K or 1M"
        )
    return int(number_text) * unit


def _split_list(text: str) -> list[str]:
    """Split a list. An empty list is an error: its text may come from an unset shell variable."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise click.BadParameter(f"{text!r} is an empty list; leave out the option for the default")
    return items


def _parse_range(
    text: str, parse: Callable[[str], int] = byte_size, example: str = _SIZE_RANGES
) -> list[int]:
    """Return the sizes of a range, or the single size. ``example`` is text for the error."""
    low_text, range_dots, high_and_factor = text.partition("..")
    high_text, colon, factor_text = high_and_factor.partition(":")
    if range_dots and not (low_text.strip() and high_text.strip()):
        raise click.BadParameter(
            f"the range {text.strip()!r} lacks its first or last size; write for example {example}"
        )
    first_size, last_size = parse(low_text), parse(high_text if range_dots else low_text)
    factor = int(factor_text) if factor_text.isdecimal() else 0 if colon else 2
    if range_dots and not 0 < first_size <= last_size:
        raise click.BadParameter(
            f"{text.strip()!r} is not an ascending range; write for example {example}"
        )
    if factor < 2:
        raise click.BadParameter(
            f"the factor of the range {text.strip()!r} is not a whole number of at least 2; write for "
            f"example {example}"
        )
    powers = [first_size * factor**i for i in range(_MAX_SIZES)]
    return [size for size in powers if size <= last_size] if range_dots else [first_size]


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
    attributes: dict[str, Any] = {"metavar": spec_option.metavar}
    match spec_option.kind:
        case "flag":
            attributes = {"is_flag": True}
        case "choice":
            attributes["type"] = click.Choice(spec_option.choices)
        case "int":
            attributes["type"] = int
        case "file":
            attributes["type"] = FILE
        case "bytes":
            attributes["type"] = byte_size
        case "name":
            attributes["type"] = Value(spec_option.choices)
        case kind:
            is_list = kind == "names"
            attributes["type"] = Value(spec_option.choices, _LIST_PARSERS[kind], is_list=is_list)
    add_option = option(
        spec_option.name,
        field_name,
        help=spec_option.help,
        multiple=spec_option.is_repeatable,
        **attributes,
    )
    return option_group(spec_option.group, add_option)[0] if spec_option.group else add_option


_LIST_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "names": parse_names,
    "counts": parse_counts,
    "sizes": parse_sizes,
    "elements": parse_elements,
}
