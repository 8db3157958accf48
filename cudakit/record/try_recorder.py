"""Try the recorder in a separate process before the program starts; run as a script.

Without arguments, the script describes its interpreter. With the paths of the recorder and of NVIDIA's
Sanitizer API, it loads both and subscribes once, so that failures happen here and not in the program; with
the path of CUPTI and the word "profile", it does the same with CUPTI. It imports only the standard library,
because it runs in the program's interpreter. The last line of the output is the result: a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def describe_interpreter() -> dict[str, Any]:
    """Return the implementation, version and search path of this Python."""
    name = sys.implementation.name
    return {"name": name, "version": sys.version_info[:3], "packages": sys.path}


def try_recorder(recorder: str, library: str, purpose: str) -> dict[str, Any]:
    """Return the error if the recorder does not work with a library.

    Otherwise return the struct layouts that the recorder was compiled with, or the version of CUPTI.
    """
    try:
        spec = spec_from_file_location("_recorder", recorder)
        if spec is None or spec.loader is None:
            raise ImportError(f"{recorder} is no extension module of this Python")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        if purpose == "profile":
            return {"version": module.check_profile(library)}
        module.check(library)
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": str(error)}
    return {"offsets": module.offsets()}


def main(recorder: str = "", library: str = "", purpose: str = "sanitize") -> None:
    """Print the result in a line of its own: start-up files of the user may have printed text."""
    result = try_recorder(recorder, library, purpose) if recorder else describe_interpreter()
    os.write(1, f"\n{json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
