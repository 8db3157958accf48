"""What PYTORCH_ALLOC_CONF asks of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.devices.diagnose.check import Finding, ok, together, warn
from cudakit.errors import InputError
from cudakit.gpu.api.run_context import RunContext
from cudakit.torch_rules.settings import PYTORCH_VARIABLES, parse_config


def allocator_settings(c: RunContext) -> Finding:
    """PyTorch's allocator is set up by PYTORCH_ALLOC_CONF, and by its older name PYTORCH_CUDA_ALLOC_CONF.

    The form is key:value,key:value. A key that PyTorch does not know, or a value that a key cannot have,
    stops the program at its first use of CUDA; some of what is wrong PyTorch takes in silence, and does not
    follow as written. Keys are those of PyTorch 2.15; older versions refuse what is newer. Where
    both names are set, the one with CUDA in it wins, even if it is empty. With backend:cudaMallocAsync the
    keys of the native allocator do nothing.
    """
    told = {name: c.variables[name] for name in PYTORCH_VARIABLES if name in c.variables}
    if not any(told.values()):
        return ok("PyTorch's allocator has its default settings")
    name, value = next(iter(told.items()))
    problems = list(_wrong(name, value))
    if len(set(told.values())) > 1:
        problems.append(
            warn(f"both {' and '.join(told)} are set; {name} wins", told, f"unset {name}")
        )
    return together(
        problems, otherwise=ok(f"PyTorch's allocator is set up by {name}={value}", told)
    )


def _wrong(name: str, text: str) -> Iterator[Finding]:
    try:
        parse_config(text, variable=name)
    except InputError as error:
        otherwise = f"export {name}=expandable_segments:True, or unset it"
        yield warn(error.message, {name: text}, *filter(None, [error.hint]), otherwise)
