"""Checks of environment variables (CK020 to CK024), driven by the table of variables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cudakit.devices.doctor.check import Finding, SetVariable, ok, warn
from cudakit.errors import InputError
from cudakit.gpu.api.facts import RunContext
from cudakit.torch_rules.settings import PYTORCH_VARIABLES, VARIABLES, parse_config


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of the table: an environment variable and its effect."""

    name: str
    library: str  # library that reads the variable, such as "CUDA", "PyTorch" or "NCCL"
    effect: str
    source: str  # section of the documentation, or source file
    check: str  # id of the check that warns about the variable unless it is off; empty if there is none


@cache
def known_variables() -> Mapping[str, Variable]:
    """Return the table variables.toml by the name of the variable."""
    table = files("cudakit.devices.doctor").joinpath("variables.toml").read_text("utf-8")
    variables = {}
    for group in tomllib.loads(table)["source"]:
        for name, text in group["variables"].items():
            check, effect = re.fullmatch(r"(?:(CK\d+): )?(.+)", text).groups(default="")  # type: ignore[union-attr]
            variables[name] = Variable(name, group["library"], effect, group["source"], check)
    return variables


_OFF_VALUES = ("", "0", "false", "f", "no", "n", "off")
_SWITCH_MARK = "1: "  # begins the effect of a switch in the table
# Minimum workspace of cuBLASLt. Its kernels for Hopper need 32 MiB; few kernels can run with less than 1 MiB.
_MIN_WORKSPACE_KIB = 1024
_WORKSPACE_FORM = re.compile(r"(:\d+:\d+)+")


@dataclass(frozen=True, slots=True)
class VariableRule:
    """A warning about some values of a variable. The texts have the placeholders {name} and {value}."""

    name: str
    matches_value: Callable[[str], bool]  # function that returns whether a value gets the warning
    message: str
    fix: str = "unset {name}"


def _is_on(value: str) -> bool:
    return value.strip().lower() not in _OFF_VALUES


def rules_of(check: str, fix: str = "unset {name}") -> tuple[VariableRule, ...]:
    """Return the rules of the table for a check. Each rule warns if its variable is set to an "on" value."""
    return tuple(
        VariableRule(variable.name, _is_on, f"{{name}}={{value}}: {variable.effect}", fix)
        for variable in known_variables().values()
        if variable.check == check
    )


def apply_rules(rules: Iterable[VariableRule], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the warning of each rule that applies to the value of its variable."""
    for rule in rules:
        value = variables.get(rule.name)
        if value is not None and rule.matches_value(value):
            message, fix = (
                template.format(name=rule.name, value=value)
                for template in (rule.message, rule.fix)
            )
            yield warn(message, {rule.name: value}, fix)


def set_variables(context: RunContext) -> tuple[SetVariable, ...]:
    """Return the variables of the table that are set, with their values and effects."""
    values = {**context.software.nccl_conf, **context.variables}
    found = []
    for name, variable in known_variables().items():
        if name in values:
            value, effect = values[name], variable.effect.removeprefix(_SWITCH_MARK)
            is_switch = effect != variable.effect
            if (is_switch or variable.check) and not _is_on(value):
                # With an empty value, libraries use their default, which may be on.
                effect = f"{'off' if value.strip() else 'empty'}; if on, {effect}"
            found.append(SetVariable(name, value, effect, variable.library, variable.source))
    return tuple(found)


# --- CK020: debugging ------------------------------------------------------------------------------


def debugging(context: RunContext) -> Iterator[Finding]:
    """Debugging variables make CUDA programs slow if they stay set.

    CUDA_LAUNCH_BLOCKING=1 is the best known: every launch waits for its kernel, so nothing overlaps. Other
    variables compile every kernel again, disable PyTorch's caching allocator, or run Numba's and Triton's
    kernels on the CPU.
    """
    yield from apply_rules(rules_of("CK020"), context.variables)
    yield ok("no debugging variable is set")


# --- CK021: allocators -----------------------------------------------------------------------------


def allocator(context: RunContext) -> Iterator[Finding]:
    """PYTORCH_ALLOC_CONF, and its older name PYTORCH_CUDA_ALLOC_CONF, set up PyTorch's allocator.

    The form is key:value,key:value. An unknown key or an invalid value stops the program at its first use
    of CUDA; PyTorch ignores some other mistakes silently. The keys are those of PyTorch 2.15; older
    versions refuse newer keys. If both variables are set, the older name wins, even if it is empty. With
    backend:cudaMallocAsync the keys of the native allocator have no effect. CUDAKIT_ALLOC_CONF has the
    same form and sets up cudakit's allocator, which rejects every mistake and has only the native backend.
    """
    settings = {name: context.variables[name] for name in VARIABLES if name in context.variables}
    if not any(settings.values()):
        yield ok("PyTorch's allocator has its default settings")
        return
    pytorch_settings = {name: settings[name] for name in PYTORCH_VARIABLES if name in settings}
    # PyTorch reads the first of its variables only; CUDAKIT_ALLOC_CONF configures another allocator.
    applied = dict([*pytorch_settings.items()][:1])
    applied |= {name: text for name, text in settings.items() if name not in pytorch_settings}
    for name, text in applied.items():
        try:
            backend = parse_config(text, variable=name).backend
        except InputError as error:
            yield warn(
                error.message, {name: text}, error.hint or f"correct the value, or unset {name}"
            )
            continue
        if name not in PYTORCH_VARIABLES and backend != "native":
            yield warn(
                f"cudakit's allocator does not support backend:{backend} of {name}",
                {name: text},
                f"remove backend:{backend} from {name}",
            )
    if len(set(pytorch_settings.values())) > 1:
        winner = next(iter(pytorch_settings))
        summary = f"both {' and '.join(pytorch_settings)} are set; {winner} wins"
        yield warn(summary, pytorch_settings, f"unset {winner}")
    applied_text = " and ".join(f"{name}={text}" for name, text in applied.items())
    yield ok(f"the settings of {applied_text} are valid", settings)


# --- CK022: NCCL -----------------------------------------------------------------------------------


def nccl(context: RunContext) -> Iterator[Finding]:
    """Some NCCL variables disable fast transfers, and often remain in scripts after debugging.

    NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_IB_DISABLE each disable one kind of transfer;
    NCCL_DEBUG=INFO or TRACE writes long logs. NCCL also reads /etc/nccl.conf; the environment overrides
    it. Variables that describe the machine get no warning: network interfaces (NCCL_SOCKET_IFNAME,
    NCCL_IB_HCA) and features that a virtual machine lacks (NCCL_NVLS_ENABLE=0).
    """
    settings = {**context.software.nccl_conf, **context.variables}
    rules = rules_of("CK022", "unset {name}, unless this machine needs it")
    yield from apply_rules(rules, settings)
    for name, variable in known_variables().items():
        if variable.effect.startswith("former name of") and name in settings:
            yield warn(
                f"PyTorch 2.2 and newer read TORCH_{name} instead of {name}",
                {name: settings[name]},
                f"export TORCH_{name}={settings[name]}; unset {name}",
            )
    log_level = settings.get("NCCL_DEBUG", "").upper()
    if log_level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn(
            f"NCCL_DEBUG={log_level}: every rank writes a long log",
            {"NCCL_DEBUG": log_level},
            "export NCCL_DEBUG=WARN",
        )
    nccl_settings = {
        name: value
        for name, value in sorted(settings.items())
        # NVIDIA's container images set NCCL_VERSION; NCCL does not read it.
        if name.startswith("NCCL_") and name != "NCCL_VERSION" and not _nearest_variable(name)
    }
    if nccl_settings:
        set_text = ", ".join(nccl_settings)
        yield ok(f"no setting of NCCL gets a warning; set: {set_text}", nccl_settings)
    else:
        yield ok("NCCL has its default settings")


# --- CK023: cuBLAS and cuDNN -----------------------------------------------------------------------


def math_libraries(context: RunContext) -> Iterator[Finding]:
    """Variables of cuBLAS and cuDNN change speed, precision, determinism and logging.

    NVIDIA_TF32_OVERRIDE=0 disables TF32 everywhere: float32 GEMMs then run without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes all float32 GEMMs use TF32, with less precision than a program
    may expect. torch.use_deterministic_algorithms needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small value excludes the fast kernels.
    """
    yield from apply_rules((*rules_of("CK023"), *_MATH_RULES), context.variables)
    math_settings = {
        name: value
        for name, value in sorted(context.variables.items())
        if (name.startswith(("CUBLAS", "CUDNN_")) or "TF32" in name) and not _nearest_variable(name)
    }
    if math_settings:
        set_text = ", ".join(math_settings)
        yield ok(f"no setting slows down cuBLAS or cuDNN; set: {set_text}", math_settings)
    else:
        yield ok("cuBLAS and cuDNN have their default settings")


_MATH_RULES = (
    VariableRule(
        "NVIDIA_TF32_OVERRIDE",
        "0".__eq__,
        "{name}={value}: no library uses TF32, so float32 GEMMs are far slower",
    ),
    VariableRule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "1".__eq__,
        "{name}={value}: float32 GEMMs have only the precision of TF32",
    ),
    VariableRule(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: not _WORKSPACE_FORM.fullmatch(value),
        "{name}={value} does not have the form :KiB:count",
        "export {name}=:4096:8",
    ),
    VariableRule(
        "CUBLASLT_WORKSPACE_SIZE",
        lambda value: value.isdecimal() and int(value) < _MIN_WORKSPACE_KIB,
        "{name}={value} KiB is too small for cuBLASLt's fast kernels",
    ),
)


# --- CK024: misspellings ---------------------------------------------------------------------------

_VARIABLE_PREFIXES = (
    "CUDA",
    "NVIDIA_",
    "NVTX_",
    "CUBLAS",
    "CUDNN",
    "PYTORCH_",
    "TORCH",
    "NCCL_",
    "TRITON_",
    "JAX_",
    "XLA_",
    "NUMBA_CUDA",
    "NUMBA_ENABLE_CUDA",
)
# Minimum length of a name in which two letters may be wrong. In a shorter name, only one may be.
_LONG_NAME_LENGTH = 16


def misspelled(context: RunContext) -> Iterator[Finding]:
    """A misspelled environment variable has no effect, and no library reports it.

    CUDA_VISIBLE_DEVICE=1 (without the S) hides no device. A name is reported if it differs by one letter
    (two in a long name) or two swapped letters from a variable of CUDA, its libraries or frameworks, or of
    cudakit.
    """
    for name, value in sorted(context.variables.items()):
        known = _nearest_variable(name)
        if known:
            yield warn(
                f"no library reads {name}; the variable is {known}",
                {name: value},
                f"export {known}={value}; unset {name}",
            )
    yield ok("no misspelled environment variable")


def _nearest_variable(name: str) -> str:
    """Return the known name that a misspelled name is most similar to, or an empty text."""
    upper_name = name.upper()
    if name in known_variables() or not upper_name.startswith(_VARIABLE_PREFIXES):
        return ""
    distance, nearest = min(
        (_edit_distance(upper_name, known), known) for known in known_variables()
    )
    return nearest if distance <= (2 if len(nearest) >= _LONG_NAME_LENGTH else 1) else ""


def _edit_distance(first_text: str, second_text: str) -> int:
    """Return the number of inserted, deleted, replaced or swapped letters between two texts.

    Two adjacent letters in the wrong order count once (optimal string alignment distance).
    """
    if abs(len(first_text) - len(second_text)) > 2:
        return 3  # every distance above 2 means that the names are not similar
    rows = [list(range(len(second_text) + 1))]
    for row_number, first_letter in enumerate(first_text, start=1):
        row = [row_number]
        for column, second_letter in enumerate(second_text, start=1):
            distance = min(
                rows[-1][column] + 1,
                row[-1] + 1,
                rows[-1][column - 1] + (first_letter != second_letter),
            )
            first_pair = first_text[max(row_number - 2, 0) : row_number]
            second_pair = second_text[max(column - 2, 0) : column]
            if len(first_pair) == 2 and first_pair == second_pair[::-1]:
                distance = min(distance, rows[-2][column - 2] + 1)
            row.append(distance)
        rows.append(row)
    return rows[-1][-1]
