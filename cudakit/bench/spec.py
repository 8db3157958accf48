"""Specs: what to measure and how. A Spec is validated without a device.

A benchmark is a subclass of Spec. Its fields made by ``option`` are the options of its command, from which
``cli`` builds those of click; see ``benchmarks`` for how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

from cudakit.bench.case import Cache, Case, Method, Mode, Rule
from cudakit.bench.result import BenchResult
from cudakit.bench.words import Words
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu

# Measurement modes that a user can choose. Mode "call" is missing, because it only suits latencies.
MODES = ("isolated", "batch", "graph", "host")
CACHES = ("rotate", "flush", "hot")

_MAX_ROUNDS = 1000
_MAX_SAMPLES = 1_000_000
_MAX_WARMUP_S = 3600


# --- the options of a command -----------------------------------------------------------------------

# How the text of an option is read. names, counts, sizes (bytes) and elements are comma-separated lists.
OptionKind: TypeAlias = Literal[
    "names", "counts", "sizes", "elements", "name", "choice", "int", "bytes", "file", "flag"
]


_METAVARS: Mapping[OptionKind, str] = {
    "names": "NAME,...",
    "counts": "N,...",
    "sizes": "SIZE,...",
    "elements": "N,...",
    "name": "NAME",
    "int": "N",
    "bytes": "SIZE",
    "file": "FILE",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a benchmark's command, for the field of the same name."""

    name: str  # "--sizes"
    help: str
    kind: OptionKind
    metavar: str
    # Values that the shell offers; those of a "choice" are the only valid ones.
    choices: Sequence[str]
    group: str  # Title of the options in the help among which it is listed; "" for "Options".
    is_repeatable: bool


def option(
    name: str,
    help: str,  # noqa: A002
    *,
    default: Any = None,
    kind: OptionKind = "names",
    metavar: str = "",
    choices: Sequence[str] = (),
    group: str = "",
    is_repeatable: bool = False,
) -> Any:
    """Return a dataclass field with an option; ``default`` is used if the user does not pass the option."""
    metavar = metavar or _METAVARS.get(kind, "")
    metadata = Option(name, help, kind, metavar, choices, group, is_repeatable)
    return field(default=default, metadata={"option": metadata})


def sizes_option(meaning: str, *, default: str = "", group: str = "") -> Any:
    """Return the field of ``--sizes``; the help shows ``default``."""
    text = (
        f"{meaning}: a list (64KiB,1MiB), a range that doubles (1MiB..1GiB) or grows by a factor "
        f"(1KiB..1GiB:4).{f'  [default: {default}]' if default else ''}"
    )
    return option("--sizes", text, kind="sizes", group=group)


def mode_option(shown_default: str, *, default: Mode | None = None, group: str = "") -> Any:
    """Return the field of ``--mode``; the help shows ``shown_default``."""
    text = (
        "How a sample is timed: isolated (one execution between two events), batch (many between two "
        "events), graph (many in a CUDA graph) or host (one, with the host's clock).  "
        f"[default: {shown_default}]"
    )
    return option(
        "--mode", text, default=default, kind="choice", metavar="MODE", choices=MODES, group=group
    )


def cache_option(shown_default: str, *, default: Cache | None = None, group: str = "") -> Any:
    """Return the field of ``--cache``; the help shows ``shown_default``."""
    text = (
        "L2 state before each sample: rotate (cycle through buffers), flush (overwrite the L2) or hot "
        f"(operands cached).  [default: {shown_default}]"
    )
    return option(
        "--cache",
        text,
        default=default,
        kind="choice",
        metavar="STATE",
        choices=CACHES,
        group=group,
    )


def options_of(options_class: type) -> Iterator[tuple[str, Option]]:
    """Yield the field name and the Option of each field with one."""
    for options_field in fields(options_class):
        if "option" in options_field.metadata:
            yield options_field.name, options_field.metadata["option"]


# --- Specs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a benchmark measures, and the options that all benchmarks share.

    The description of a subclass is that of its command. Specs raise InputError for invalid values.
    """

    bench: ClassVar[str]  # Name of the benchmark in results.
    words: ClassVar[Words] = Words()  # What its report says, and those of others do not.

    seed: int = 0  # Seed of random data.
    warmup_s: float = 0.25  # Minimum warm-up time per case.
    rule: Rule = Rule()  # Stopping rule of a case. The user can override each of its values.
    rounds: int = 5  # Number of groups of samples; each group has new buffers.
    blocker: bool = True  # Whether a blocking kernel hides launch gaps.
    budget_s: float | None = None  # Approximate time for all cases together; None: no budget.

    def __post_init__(self) -> None:
        check_range("--seed", self.seed, 0, 2**64 - 1)
        check_range("--warmup", self.warmup_s, 0, _MAX_WARMUP_S)
        check_range("--samples", self.rule.min_samples, 1, _MAX_SAMPLES)
        check_range("the minimum sampling time", self.rule.min_time_s, 0, math.inf)
        check_range("--rounds", self.rounds, 1, _MAX_ROUNDS)
        check_positive("--precision", self.rule.precision)
        check_positive("--timeout", self.rule.timeout_s)
        if self.budget_s is not None:
            check_positive("--budget", self.budget_s)

    @classmethod
    def options(cls) -> Iterator[tuple[str, Option]]:
        """Yield the options of the command, each with the name under which ``from_options`` gets it."""
        return options_of(cls)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, simulated: bool) -> Spec:  # noqa: ARG003
        """Return the Spec for the options that the user passed; ``simulated``: no real GPU is measured."""
        return cls.with_rule(options)

    @classmethod
    def with_rule(cls, options: Mapping[str, Any]) -> Self:
        """Return a Spec; options that are values of the stopping rule replace those of its default."""
        rule_names = {field.name for field in fields(Rule)} & options.keys()
        rule = replace(cls.default_rule(), **{name: options[name] for name in rule_names})
        return cls(
            **{name: value for name, value in options.items() if name not in rule_names}, rule=rule
        )

    @classmethod
    def default_rule(cls) -> Rule:
        """Return the stopping rule of a Spec for which none is given."""
        (rule,) = (field.default for field in fields(cls) if field.name == "rule")
        return cast(Rule, rule)

    def cases(self, gpu: Gpu) -> tuple[Case, ...]:
        """Return the cases to measure. Raises Unsupported if the device does not support any."""
        raise NotImplementedError

    def conclude(self, result: BenchResult, cases: Sequence[Case]) -> BenchResult:  # noqa: ARG002
        """Return the result with figures that need several of its ``cases``, if there are any."""
        return result

    def method(self, mode: Mode, cache: Cache, fill: str = "no") -> Method:
        """Return the measurement method of a case: the given mode and L2 state, and options of the Spec."""
        return Method(
            mode,
            cache,
            self.warmup_s,
            self.rule,
            blocker=self.blocker,
            rounds=self.rounds,
            fill=fill,
            seed=self.seed,
        )


def check_sizes(sizes_bytes: tuple[int, ...] | None, unit_bytes: int) -> None:
    """Raise InputError for sizes that are no positive multiples of a unit."""
    check_not_empty("sizes", sizes_bytes)
    for size_bytes in sizes_bytes or ():
        if size_bytes <= 0:
            raise InputError(
                f"--sizes: {size_bytes} bytes is not a positive size",
                hint="for example: --sizes 64MiB",
            )
        if size_bytes % unit_bytes:
            rounded_bytes = max(size_bytes // unit_bytes, 1) * unit_bytes
            raise InputError(
                f"--sizes: {size_bytes} bytes is not a multiple of {unit_bytes}",
                hint=f"the nearest size is {rounded_bytes} bytes",
            )


def check_names(noun: str, names: Collection[str], valid_names: tuple[str, ...]) -> None:
    """Raise InputError for no names, and for names that are not valid."""
    hint = f"choose from {', '.join(valid_names)}"
    if not names:
        raise InputError(f"no {noun} was given", hint=hint)
    for name in names:
        if name not in valid_names:
            raise InputError(f"unknown {noun} {name!r}", hint=hint)


def check_method(mode: str | None, cache: str | None) -> None:
    """Raise InputError for a mode or L2 state that users cannot choose."""
    if mode is not None:
        check_names("mode", (mode,), MODES)
    if cache is not None:
        check_names("cache", (cache,), CACHES)


def check_not_empty(noun: str, values: Collection[int] | None) -> None:
    """Raise InputError for an empty list."""
    if values is not None and not values:
        raise InputError(
            f"the list of {noun} is empty", hint="remove the option to use the default"
        )


def check_positive(option: str, value: float) -> None:
    """Raise InputError for a number that is not above 0."""
    if not 0 < value < math.inf:
        raise InputError(f"{option} is {value:g}; it must be a number above 0")


def check_range(option: str, value: float, low: float, high: float) -> None:
    """Raise InputError for a number that is not within these limits."""
    if not low <= value <= high or math.isnan(value):
        allowed_range = f"at least {low:,}" if math.isinf(high) else f"from {low:,} to {high:,}"
        value_text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        raise InputError(f"{option} is {value_text}; it must be {allowed_range}")
