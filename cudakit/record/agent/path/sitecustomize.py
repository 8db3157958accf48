"""Start the agent in a Python program, then run the sitecustomize module that this module hides.

Python imports this module at startup, since this directory is the first in PYTHONPATH. The directory must
contain no other file, which could hide a module of the program. This file imports only modules that Python
itself has imported, so that the program's imports stay as they are without cudakit. See ``site`` in the
standard library.
"""

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import spec_from_file_location

_THIS_DIRECTORY = os.path.dirname(__file__)


def _start_agent() -> None:
    path = os.path.join(os.path.dirname(_THIS_DIRECTORY), "start.py")
    spec = spec_from_file_location("_cudakit_agent", path)
    if spec and spec.loader:
        agent = module_from_spec(spec)
        spec.loader.exec_module(agent)
        agent.start(_THIS_DIRECTORY)


def _run_hidden_module() -> None:
    """Run the program's own sitecustomize module, which this module hides."""
    specs = (finder.find_spec("sitecustomize", None) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    if spec is None or spec.loader is None:
        # site ignores this error, and the import system then removes this module from sys.modules.
        raise ImportError("there is no other sitecustomize", name="sitecustomize")
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if path != _THIS_DIRECTORY]
sys.path_importer_cache.pop(_THIS_DIRECTORY, None)
try:  # noqa: SIM105 Python has not imported contextlib
    _start_agent()
except Exception:  # noqa: BLE001, S110 an error must not disturb the program; start.py reports failures
    pass
_run_hidden_module()
