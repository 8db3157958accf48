"""The agent: starts the recording that ``cudakit run`` requested, inside the program's process.

This module is loaded by path into programs that may not have cudakit installed. It imports only modules that
Python itself has already imported, so annotations are quoted instead of importing ``__future__``. A failure
is written as a line of ``PID.failed`` in the spool, and the program continues.
"""

import os
import sys
from _frozen_importlib import ModuleSpec, module_from_spec
from _frozen_importlib_external import ExtensionFileLoader, spec_from_file_location

TYPE_CHECKING = False  # has the meaning of typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

SETTINGS = "CUDAKIT_AGENT"
SPOOL = "CUDAKIT_SPOOL"
ONLY = "CUDAKIT_SPOOL_PROCESS"

# The module that multiprocessing runs in a helper process. This process runs no code of the program.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"


def start(directory: str) -> None:
    """Start the recording that the environment requests; ``directory`` is the agent's entry in PYTHONPATH."""
    settings_text = os.environ.get(SETTINGS)
    if not settings_text or any(_RESOURCE_TRACKER in argument for argument in sys.orig_argv):
        return
    settings = parse(settings_text)
    spool = Spool(settings["spool"])
    if not settings["follow"]:
        spool.attempt(lambda: remove_from_environment(directory))
    recorders: list[Any] = []
    if settings["recorder"]:
        notice_kind = "unrecorded" if settings["sanitize"] or settings["cupti"] else "failed"
        spool.attempt(lambda: recorders.append(record(settings, spool)), notice_kind)
    if settings["memory"]:
        spool.attempt(lambda: record_memory(settings, spool, *recorders))


class Spool:
    """The directory for messages to the supervisor. Each message is one line in a file of the process."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def attempt(self, action: "Callable[[], None]", notice_kind: str = "failed") -> None:
        """Run an action. If it raises, report the exception as ``notice_kind`` instead of raising it."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 an error of cudakit must not disturb the program
            self.report(notice_kind, f"{type(error).__name__}: {error}")

    def report(self, notice_kind: str, line: str) -> None:
        """Append a line to the file ``PID.NOTICE_KIND`` of this process."""
        try:
            with open(f"{self.directory}/{os.getpid()}.{notice_kind}", "ab") as file:
                file.write(" ".join(line.split("\n")).encode("utf-8", "surrogateescape") + b"\n")
        except OSError:
            pass  # the supervisor has ended


def parse(text: str) -> "dict[str, Any]":
    """Parse a JSON object, if possible with the C part of ``json``, which imports no other module."""
    try:
        from _json import make_scanner

        parsed_value, _ = make_scanner(_Decoder())(text, 0)  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError):
        from json import loads

        parsed_value = loads(text)
    return dict(parsed_value)


class _Decoder:
    """The attributes of ``json.JSONDecoder`` that the scanner reads."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float = parse_constant = float
    parse_int = int


def remove_from_environment(directory: str) -> None:
    """Remove the variables that make children of this process start the agent."""
    del os.environ[SETTINGS]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    other_entries = os.pathsep.join(entry for entry in entries if entry != directory)
    if other_entries:
        os.environ["PYTHONPATH"] = other_entries
    else:
        os.environ.pop("PYTHONPATH", None)
    if SPOOL in os.environ:
        os.environ[ONLY] = str(os.getpid())


def record(settings: "dict[str, Any]", spool: "Spool") -> "Any":
    """Start the native recorder and return it.

    Raises RuntimeError if CUDA cannot be recorded and races are to be found. A recording of memory alone
    continues with the hooks of memory pools.
    """
    torch_import = _load_module("torch_import")
    recorder = _load_extension("_recorder", settings["recorder"])
    walker_address = _frame_walker_address(settings, spool)
    patches = []
    for capability_number, path in settings["patches"].items():
        with open(path, "rb") as file:
            patches.append((int(capability_number), file.read()))
    memory_only = not settings["sanitize"]
    try:
        if settings["library"] and (loaded_path := _mapped_path(b"/libcuda.so")):
            # The Sanitizer API has then missed earlier calls.
            raise RuntimeError(f"CUDA was loaded before recording could start: {loaded_path}")
        other_nvtx_tool = recorder.start(
            spool.directory,
            settings["library"],
            walker_address,
            patches,
            memory_only,
            settings["templates"],
        )
    except RuntimeError as error:
        if not memory_only:
            raise
        spool.report("failed", f"allocations from the driver are not recorded: {error}")
        settings["library"] = ""
        other_nvtx_tool = recorder.start(spool.directory, "", walker_address, patches, memory_only)
    if other_nvtx_tool:
        spool.report(
            "failed", f"NVTX ranges are not recorded: NVTX_INJECTION64_PATH is {other_nvtx_tool}"
        )
    spool.attempt(
        lambda: torch_import.after_import(
            "torch",
            lambda: spool.attempt(
                lambda: torch_import.attribute_backward(recorder, ranges=bool(settings["memory"]))
            ),
        )
    )
    if settings["cupti"]:
        profile(settings, recorder, spool)
    import atexit

    atexit.register(delete_if_abandoned, settings["spool"])
    if patches or settings["cupti"]:
        # This handler runs before ``delete_if_abandoned``. An exit handler in C would be too late, because
        # CUDA may be unloaded then.
        atexit.register(recorder.finish)
        torch_import.after_import(
            "multiprocessing.util", lambda: spool.attempt(lambda: finish_with_worker(recorder))
        )
    # The recorder stops in an exit handler in C: after Python's cleanup, which is recorded too, and before
    # libraries destroy their contexts, because NVIDIA's library crashes if the recording stops later.
    if not settings["follow"]:
        os.register_at_fork(after_in_child=recorder.stop)
    return recorder


def profile(settings: "dict[str, Any]", recorder: "Any", spool: "Spool") -> None:
    """Profile this process from its first use of CUDA. Raises RuntimeError if another tool is attached."""
    other_tool = recorder.profile(settings["cupti"], **settings["profile"])
    if other_tool:
        raise RuntimeError(f"CUDA_INJECTION64_PATH attaches another tool: {other_tool}")
    torch_import = _load_module("torch_import")

    def watch_torch() -> None:
        spool.attempt(lambda: torch_import.mark_steps(recorder))
        spool.attempt(
            lambda: torch_import.watch_profiler(lambda text: spool.report("failed", text))
        )

    torch_import.after_import("torch", watch_torch)


def finish_with_worker(recorder: "Any") -> None:
    """End the recording of a forked worker of multiprocessing, which runs no exit handlers of ``atexit``."""
    multiprocessing_util = sys.modules["multiprocessing.util"]
    last_priority = -1000  # priority: the handlers of the program and of multiprocessing run before
    multiprocessing_util.register_after_fork(
        recorder,
        lambda _: multiprocessing_util.Finalize(None, recorder.finish, exitpriority=last_priority),
    )


def delete_if_abandoned(directory: str) -> None:
    """Delete the spool if the supervisor was killed; the lock of a killed supervisor is released."""
    import fcntl

    try:
        losses_descriptor = os.open(f"{directory}/losses", os.O_RDWR)
        try:
            # This call raises OSError if the supervisor holds the lock.
            fcntl.flock(losses_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(losses_descriptor)
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    except OSError:
        pass


def record_memory(settings: "dict[str, Any]", spool: "Spool", recorder: "Any" = None) -> None:
    """Record the memory of torch and, with the native recorder, of other libraries in the program."""
    memory = _load_module("memory")
    torch_import = _load_module("torch_import")
    history = memory.History(settings["memory"], spool, settings["supervisor"], recorder)
    history.await_torch(torch_import.after_import)
    for name in ("cupy", "numba.cuda.cudadrv.driver", "rmm", "jax"):
        torch_import.after_import(name, history.run_first_at_exit)
    if recorder:
        hooks = _load_module("pool_hooks").PoolHooks(
            recorder,
            spool.attempt,
            lambda text: spool.report("jax", text),
            driver_is_recorded=bool(settings["library"]),
        )
        hooks.watch(torch_import.after_import)


def _load_module(name: str) -> "Any":
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    spec = spec_from_file_location(f"_cudakit_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _mapped_path(name: bytes) -> str:
    """Return the path of a mapped file whose path contains ``name``, or an empty string."""
    with open("/proc/self/maps", "rb") as maps_file:
        paths = (line.split(maxsplit=5)[-1].strip() for line in maps_file if name in line)
        return next(paths, b"").decode(errors="replace")


def _frame_walker_address(settings: "dict[str, Any]", spool: "Spool") -> int:
    """Return the address of the C functions that read the stacks of this interpreter, or 0.

    If races are to be found, also make these functions number the calls of the program.
    """
    walker_addresses: list[int] = []

    def load_frame_reader(path: str) -> None:
        frame_reader = _load_extension("_frames", path)
        walker_addresses.append(frame_reader.walker)
        if settings["sanitize"]:
            frame_reader.watch_program_calls(*settings["program_files"])

    path = settings["frames"].get(sys.implementation.cache_tag or "")
    if path:
        spool.attempt(lambda: load_frame_reader(path))
    return walker_addresses[0] if walker_addresses else 0


def _load_extension(name: str, path: str) -> "ModuleType":
    loader = ExtensionFileLoader(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    loader.exec_module(module)
    return module
