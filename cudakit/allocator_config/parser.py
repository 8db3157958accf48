"""Configurations as PYTORCH_CUDA_ALLOC_CONF holds them, read strictly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from difflib import get_close_matches

from cudakit.allocator_config.keys import DROPPED, KEYS, SPELLINGS
from cudakit.allocator_config.rules import SettingRefused
from cudakit.allocator_config.settings import Settings
from cudakit.allocator_config.text import Entry, Piece, read_entries

# In the order in which PyTorch looks (AcceleratorAllocatorConfig::instance: the old name before the new one,
# against what its header says).
PYTORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The name of cudakit's own allocator alone goes first.
VARIABLES = ("CUDAKIT_ALLOC_CONF", *PYTORCH_VARIABLES)


class SettingsWarning(UserWarning):
    """More than one variable configures the allocator."""


def effective(environment: Mapping[str, str]) -> Settings:
    """Return the settings that an environment asks for.

    The first of CUDAKIT_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF that is set is the
    whole configuration, even where it is empty: nothing is merged, and the others are not read. Where they
    differ from it, a SettingsWarning says which one counts. Raises InputError as ``parse_config`` does.
    """
    told = [variable for variable in VARIABLES if variable in environment]
    if not told:
        return Settings()
    first, *others = told
    if ignored := [name for name in others if environment[name] != environment[first]]:
        warnings.warn(
            f"{' and '.join([first, *ignored])} are set; {first} counts for this allocator",
            SettingsWarning,
            stacklevel=2,
        )
    return parse_config(environment[first], variable=first)


def parse_config(text: str, *, variable: str = "PYTORCH_CUDA_ALLOC_CONF") -> Settings:
    """Read a configuration: ``key:value,key:[a:b,c:d]``; what is left out has its default.

    Takes what PyTorch 2.15 takes, and refuses what PyTorch takes in silence and does not follow, or not as
    written: missing separators, space inside of words, a key twice, numbers with something after them
    or with a minus, intervals of divisions that fall or lie beyond the last, malformed reserves, and
    keys of the native backend beside another one.

    Raises InputError with one line: the variable, the character (from 1), what is there, and what would
    be right.
    """
    entries: dict[str, Entry] = {}
    found: dict[str, object] = {}
    for entry in read_entries(variable, text):
        name = _known(entry.key)
        key = KEYS[name]
        if key.field in entries:
            earlier = entries[key.field].key
            raise entry.key.refused(
                f"{name} is there twice, first at character {earlier.at + 1}",
                hint="keep one of them",
            )
        entries[key.field] = entry
        found[key.field] = key.read(entry)
    _check_backend(entries, found)
    try:
        return Settings(**found)  # type: ignore[arg-type]  # each reader returns the type of its field
    except SettingRefused as refused:
        entry = entries[refused.field]
        raise entry.value.refused(
            f"{entry.key.text} is {refused.seen}; it must be {refused.right}"
        ) from None


def _known(key: Piece) -> str:
    """Return the name under which PyTorch documents a key."""
    name = SPELLINGS.get(key.text, key.text)
    if name in KEYS:
        return name
    if name in DROPPED:
        raise key.refused(f"PyTorch has dropped {name}, and refuses it", hint="leave it out")
    near = get_close_matches(name[:80], KEYS, n=1, cutoff=0.0)[0]
    raise key.refused(
        f"PyTorch knows no key {key.shown}; the nearest is {near!r}",
        hint=f"the keys: {', '.join(KEYS)}",
    )


def _check_backend(entries: Mapping[str, Entry], found: Mapping[str, object]) -> None:
    backend = found.get("backend", "native")
    if backend == "native":
        return
    for entry in entries.values():
        if KEYS[_known(entry.key)].native:
            raise entry.key.refused(
                f"{entry.key.text} does nothing with backend:{backend}",
                hint="leave out one of them",
            )
