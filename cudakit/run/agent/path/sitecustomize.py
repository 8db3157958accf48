"""Start the agent in a Python program, then run the sitecustomize that this one hides.

Python imports this module at startup, since this directory is the first in PYTHONPATH. The directory must
contain nothing else: it could hide a module of the program. For the same reason this file imports only
modules that Python itself has imported. See ``site`` in the standard library.
"""

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import spec_from_file_location

_HERE = os.path.dirname(__file__)


def _start_agent() -> None:
    path = os.path.join(os.path.dirname(_HERE), "start.py")
    spec = spec_from_file_location("_cudakit_agent", path)
    if spec and spec.loader:
        agent = module_from_spec(spec)
        spec.loader.exec_module(agent)
        agent.start(_HERE)


def _run_hidden() -> None:
    """Run the program's own sitecustomize instead of this one."""
    found = (finder.find_spec("sitecustomize", None) for finder in sys.meta_path)
    spec = next(filter(None, found), None)
    if spec is None or spec.loader is None:
        # site ignores this error, and the import system then drops this module.
        raise ImportError("there is no other sitecustomize", name="sitecustomize")
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if entry != _HERE]
sys.path_importer_cache.pop(_HERE, None)
try:  # noqa: SIM105 Python has not imported contextlib
    _start_agent()
except Exception:  # noqa: BLE001, S110 must not disturb the program; start reports failures
    pass
_run_hidden()
