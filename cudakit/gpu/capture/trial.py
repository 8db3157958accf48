"""The process in which the recorder is tried before the program starts; run as a script.

Alone it tells of its interpreter. With the paths of the recorder and of NVIDIA's library it loads both
and subscribes once, so that what goes wrong goes wrong here. It is of the standard library only, since
the interpreter is the program's. The answer is one JSON object, the last line of the output.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def interpreter() -> dict[str, Any]:
    """Return which Python this is, and where its packages are."""
    name = sys.implementation.name
    return {"name": name, "version": sys.version_info[:3], "packages": sys.path}


def attempt(recorder: str, library: str) -> dict[str, Any]:
    """Return the layouts that the recorder was compiled with, or why it does not work."""
    try:
        module = _load(recorder)
        module.check(library)
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": str(error)}
    return {"offsets": module.offsets()}


def _load(path: str) -> Any:
    spec = spec_from_file_location("_recorder", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module of this Python")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(recorder: str = "", library: str = "") -> None:
    """Answer; what else prints, such as a start-up file of the user's, comes before."""
    answer = attempt(recorder, library) if recorder else interpreter()
    os.write(1, f"\n{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
