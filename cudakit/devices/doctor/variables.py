"""Checks of environment variables (CK020 to CK024), driven by the table of variables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cudakit.devices.doctor.check import (
    Finding,
    SetVariable,
    combine_findings,
    ok_finding,
    warn_finding,
)
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
        VariableRule(
            known_variable.name, _is_on, f"{{name}}={{value}}: {known_variable.effect}", fix
        )
        for known_variable in known_variables().values()
        if known_variable.check == check
    )


def apply_rules(rules: Iterable[VariableRule], variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the warning of each rule that applies to the value of its variable."""
    for rule in rules:
        variable_value = variables.get(rule.name)
        if variable_value is not None and rule.matches_value(variable_value):
            message, fix = (
                template.format(name=rule.name, value=variable_value)
                for template in (rule.message, rule.fix)
            )
            yield warn_finding(message, {rule.name: variable_value}, fix)


def set_variables(context: RunContext) -> tuple[SetVariable, ...]:
    """Return the variables of the table that are set, with their values and effects."""
    known_by_name = known_variables()
    value_by_name = {**context.software.nccl_conf, **context.variables}
    return tuple(
        SetVariable(
            name,
            value_by_name[name],
            _effect_of(known_variable, value_by_name[name]),
            known_variable.library,
            known_variable.source,
        )
        for name, known_variable in known_by_name.items()
        if name in value_by_name
    )


def _effect_of(known_variable: Variable, value: str) -> str:
    is_switch = known_variable.effect.startswith(_SWITCH_MARK)
    effect = known_variable.effect.removeprefix(_SWITCH_MARK)
    if (is_switch or known_variable.check) and not _is_on(value):
        # With an empty value, libraries use their default, which may be on.
        return f"{'off' if value.strip() else 'empty'}; if on, {effect}"
    return effect


# --- CK020: debugging ------------------------------------------------------------------------------


def debugging(context: RunContext) -> Finding:
    """Debugging variables make CUDA programs slow if they stay set.

    CUDA_LAUNCH_BLOCKING=1 is the best known: every launch waits for its kernel, so nothing overlaps. Other
    variables compile every kernel again, disable PyTorch's caching allocator, or run Numba's and Triton's
    kernels on the CPU.
    """
    findings = apply_rules(rules_of("CK020"), context.variables)
    return combine_findings(findings, otherwise=ok_finding("no debugging variable is set"))


# --- CK021: allocators -----------------------------------------------------------------------------


def allocator(context: RunContext) -> Finding:
    """PYTORCH_ALLOC_CONF, and its older name PYTORCH_CUDA_ALLOC_CONF, set up PyTorch's allocator.

    The form is key:value,key:value. An unknown key or an invalid value stops the program at its first use
    of CUDA; PyTorch ignores some other mistakes silently. The keys are those of PyTorch 2.15; older
    versions refuse newer keys. If both variables are set, the older name wins, even if it is empty. With
    backend:cudaMallocAsync the keys of the native allocator have no effect. CUDAKIT_ALLOC_CONF has the
    same form and sets up cudakit's allocator, which rejects every mistake and has only the native backend.
    """
    settings = {name: context.variables[name] for name in VARIABLES if name in context.variables}
    if not any(settings.values()):
        return ok_finding("PyTorch's allocator has its default settings")
    pytorch_settings = {name: settings[name] for name in PYTORCH_VARIABLES if name in settings}
    # PyTorch reads the first of its variables only; CUDAKIT_ALLOC_CONF configures another allocator.
    applied_settings = [*pytorch_settings.items()][:1] + [
        (name, text) for name, text in settings.items() if name not in pytorch_settings
    ]
    warnings = [
        warning for name, text in applied_settings for warning in _invalid_settings(name, text)
    ]
    if len(set(pytorch_settings.values())) > 1:
        pytorch_name = applied_settings[0][0]
        warnings.append(
            warn_finding(
                f"both {' and '.join(pytorch_settings)} are set; {pytorch_name} wins",
                pytorch_settings,
                f"unset {pytorch_name}",
            )
        )
    applied_text = " and ".join(f"{name}={text}" for name, text in applied_settings)
    return combine_findings(
        warnings, otherwise=ok_finding(f"the settings of {applied_text} are valid", settings)
    )


def _invalid_settings(name: str, text: str) -> Iterator[Finding]:
    try:
        settings = parse_config(text, variable=name)
    except InputError as error:
        fix = error.hint or f"correct the value, or unset {name}"
        yield warn_finding(error.message, {name: text}, fix)
        return
    if name not in PYTORCH_VARIABLES and settings.backend != "native":
        yield warn_finding(
            f"cudakit's allocator does not support backend:{settings.backend} of {name}",
            {name: text},
            f"remove backend:{settings.backend} from {name}",
        )


# --- CK022: NCCL -----------------------------------------------------------------------------------


def nccl(context: RunContext) -> Finding:
    """Some NCCL variables disable fast transfers, and often remain in scripts after debugging.

    NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_IB_DISABLE each disable one kind of transfer;
    NCCL_DEBUG=INFO or TRACE writes long logs. NCCL also reads /etc/nccl.conf; the environment overrides
    it. Variables that describe the machine get no warning: network interfaces (NCCL_SOCKET_IFNAME,
    NCCL_IB_HCA) and features that a virtual machine lacks (NCCL_NVLS_ENABLE=0).
    """
    settings = {**context.software.nccl_conf, **context.variables}
    nccl_settings = {
        name: variable_value
        for name, variable_value in sorted(settings.items())
        # NVIDIA's container images set NCCL_VERSION; NCCL does not read it.
        if name.startswith("NCCL_") and name != "NCCL_VERSION" and not _nearest_variable(name)
    }
    finding = ok_finding(
        f"no setting of NCCL gets a warning; set: {', '.join(nccl_settings)}", nccl_settings
    )
    return combine_findings(
        (
            *apply_rules(rules_of("CK022", _NCCL_FIX), settings),
            *apply_rules(_renamed_variables(), settings),
            *_nccl_log_warning(settings),
        ),
        otherwise=finding if nccl_settings else ok_finding("NCCL has its default settings"),
    )


_NCCL_FIX = "unset {name}, unless this machine needs it"


def _renamed_variables() -> Iterator[VariableRule]:
    for row in known_variables().values():
        if row.effect.startswith("former name of"):
            yield VariableRule(
                row.name,
                lambda value: True,  # noqa: ARG005
                f"PyTorch 2.2 and newer read TORCH_{row.name} instead of {row.name}",
                f"export TORCH_{row.name}={{value}}; unset {row.name}",
            )


def _nccl_log_warning(settings: Mapping[str, str]) -> Iterator[Finding]:
    log_level = settings.get("NCCL_DEBUG", "").upper()
    if log_level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in settings:
        yield warn_finding(
            f"NCCL_DEBUG={log_level}: every rank writes a long log",
            {"NCCL_DEBUG": log_level},
            "export NCCL_DEBUG=WARN",
        )


# --- CK023: cuBLAS and cuDNN -----------------------------------------------------------------------


def math_libraries(context: RunContext) -> Finding:
    """Variables of cuBLAS and cuDNN change speed, precision, determinism and logging.

    NVIDIA_TF32_OVERRIDE=0 disables TF32 everywhere: float32 GEMMs then run without tensor cores.
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes all float32 GEMMs use TF32, with less precision than a program
    may expect. torch.use_deterministic_algorithms needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8; the form
    is :KiB:count, repeated. CUBLASLT_WORKSPACE_SIZE is in KiB; a small value excludes the fast kernels.
    """
    math_settings = {
        name: context.variables[name]
        for name in sorted(context.variables)
        if (name.startswith(("CUBLAS", "CUDNN_")) or "TF32" in name) and not _nearest_variable(name)
    }
    finding_if_ok = ok_finding(
        f"no setting slows down cuBLAS or cuDNN; set: {', '.join(math_settings)}", math_settings
    )
    return combine_findings(
        apply_rules((*rules_of("CK023"), *_MATH_RULES), context.variables),
        otherwise=finding_if_ok
        if math_settings
        else ok_finding("cuBLAS and cuDNN have their default settings"),
    )


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


def misspelled(context: RunContext) -> Finding:
    """A misspelled environment variable has no effect, and no library reports it.

    CUDA_VISIBLE_DEVICE=1 (without the S) hides no device. A name is reported if it differs by one letter
    (two in a long name) or two swapped letters from a variable of CUDA, its libraries or frameworks, or of
    cudakit.
    """
    return combine_findings(
        (
            warn_finding(
                f"no library reads {name}; the variable is {correct_name}",
                {name: context.variables[name]},
                f"export {correct_name}={context.variables[name]}; unset {name}",
            )
            for name in sorted(context.variables)
            for correct_name in _nearest_variable(name)
        ),
        otherwise=ok_finding("no misspelled environment variable"),
    )


def _nearest_variable(name: str) -> tuple[str, ...]:
    """Return the known name that a misspelled name is most similar to, or an empty tuple."""
    known_by_name, upper_name = known_variables(), name.upper()
    if name in known_by_name or not upper_name.startswith(_VARIABLE_PREFIXES):
        return ()
    distance, nearest_name = min(
        (_edit_distance(upper_name, candidate), candidate) for candidate in known_by_name
    )
    return (
        (nearest_name,) if distance <= (2 if len(nearest_name) >= _LONG_NAME_LENGTH else 1) else ()
    )


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
