"""The agent: switches on in this process what `cudakit run` was asked for.

It is loaded by its path into programs that may have no cudakit, and imports nothing that Python has not
imported by itself, not even ``__future__``: hence the annotations in quotes. Whatever fails becomes a line
of ``PID.failed`` in the spool, and the program goes on.
"""

import os
import sys
from _frozen_importlib import ModuleSpec, module_from_spec
from _frozen_importlib_external import ExtensionFileLoader, spec_from_file_location

TYPE_CHECKING = False  # as in typing, which is not imported for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

SETTINGS = "CUDAKIT_AGENT"
SPOOL = "CUDAKIT_SPOOL"
ONLY = "CUDAKIT_SPOOL_PROCESS"

# A process that multiprocessing starts beside the program, and that runs nothing of it.
_NO_PROGRAM = "multiprocessing.resource_tracker"


def start(directory: str) -> None:
    """Do what the environment asks for; ``directory`` is the entry of PYTHONPATH that led here."""
    text = os.environ.get(SETTINGS)
    if not text or any(_NO_PROGRAM in word for word in sys.orig_argv):
        return
    settings = parse(text)
    spool = Spool(settings["spool"])
    if not settings["follow"]:
        spool.attempt(lambda: leave_children_alone(directory))
    if settings["sanitize"] and settings["recorder"]:
        spool.attempt(lambda: record(settings, spool))
    if settings["memory"]:
        spool.attempt(lambda: record_memory(settings, spool))


class Spool:
    """Where this process leaves lines for the supervisor."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def attempt(self, action: "Callable[[], None]") -> None:
        """Do something that must not harm the program, and say it where it fails."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 the program must not notice
            self.say("failed", f"{type(error).__name__}: {error}")

    def say(self, what: str, line: str) -> None:
        """Append a line to a file of this process."""
        try:
            with open(f"{self.directory}/{os.getpid()}.{what}", "ab") as file:
                file.write(" ".join(line.split("\n")).encode("utf-8", "surrogateescape") + b"\n")
        except OSError:
            pass  # the supervisor is gone, and nobody is left to be told


def parse(text: str) -> "dict[str, Any]":
    """Read JSON, by the part of ``json`` that imports nothing else if it can be had."""
    try:
        from _json import make_scanner

        value, _ = make_scanner(_Decoder())(text, 0)  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError):
        from json import loads

        value = loads(text)
    return dict(value)


class _Decoder:
    """What the scanner asks of a ``json.JSONDecoder``."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float = parse_constant = float
    parse_int = int


def leave_children_alone(directory: str) -> None:
    """Take from the environment what would make children of this process start the agent."""
    del os.environ[SETTINGS]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(entry for entry in entries if entry != directory)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)
    if SPOOL in os.environ:
        os.environ[ONLY] = str(os.getpid())


def record(settings: "dict[str, Any]", spool: "Spool") -> None:
    """Start the native recorder. Raises where CUDA is there already: what it did would be missing."""
    if library := _mapped(b"/libcuda.so"):
        raise RuntimeError(f"CUDA was loaded before it could be watched: {library}")
    recorder = _extension("_recorder", settings["recorder"])
    walker = _walker(settings["frames"], spool)
    patches = [(int(number), _content(path)) for number, path in settings["patches"].items()]
    recorder.start(settings["spool"], settings["library"], walker, *([patches] if patches else []))
    if patches:
        import atexit

        atexit.register(recorder.finish)  # by the exit handlers of C, CUDA may be gone
    # It ends by an exit handler of its own: what Python drops at its end is still to be seen, and a
    # library that destroys its context after the end of the recording crashes in that of NVIDIA's.
    if not settings["follow"]:
        os.register_at_fork(after_in_child=recorder.stop)


def record_memory(settings: "dict[str, Any]", spool: "Spool") -> None:
    """Record the memory of torch, should the program import it."""
    path = os.path.join(os.path.dirname(__file__), "memory.py")
    spec = spec_from_file_location("_cudakit_memory", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    memory = module_from_spec(spec)
    spec.loader.exec_module(memory)
    memory.History(settings["memory"], spool, settings["supervisor"]).await_torch()


def _mapped(name: bytes) -> str:
    """Return the file of that name that is mapped into this process."""
    with open("/proc/self/maps", "rb") as maps:
        found = (line.split(maxsplit=5)[-1].strip() for line in maps if name in line)
        return next(found, b"").decode(errors="replace")


def _walker(frames: dict[str, str], spool: "Spool") -> int:
    """Return the address of what reads the stacks of this interpreter, 0 where there is none."""
    walkers: list[int] = []
    path = frames.get(sys.implementation.cache_tag or "")
    if path:
        spool.attempt(lambda: walkers.append(_extension("_frames", path).walker))
    return walkers[0] if walkers else 0


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _extension(name: str, path: str) -> "ModuleType":
    loader = ExtensionFileLoader(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    loader.exec_module(module)
    return module
