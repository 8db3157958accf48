"""Give the work of autograd's threads a call stack, once the program imports torch.

The agent of ``cudakit run`` loads this file by path, into programs that may not have cudakit installed. Like
the agent, it imports only modules that Python itself has already imported.
"""

import sys

TYPE_CHECKING = False  # type checkers treat this name as true; typing is not imported
if TYPE_CHECKING:
    from _frozen_importlib import ModuleSpec
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

_RUN_BACKWARD = "_engine_run_backward"


def attribute_backward(recorder: "Any", *, ranges: bool = False) -> None:
    """Make torch's function that runs a backward pass register its call stack with the recorder.

    With ``ranges``, each pass is also recorded as a named range. Does nothing in versions of torch that have
    no such function.
    """
    modules = [sys.modules.get(name) for name in ("torch.autograd.graph", "torch.autograd")]
    run_backward = getattr(modules[0], _RUN_BACKWARD, None)
    if run_backward is None:
        return
    current_task = getattr(sys.modules.get("torch._C"), "_current_graph_task_id", None)
    wrapped_function = recorder.with_call_site(run_backward, current_task, ranges)
    for module in modules:
        if getattr(module, _RUN_BACKWARD, None) is run_backward:
            setattr(module, _RUN_BACKWARD, wrapped_function)


def mark_steps(recorder: "Any") -> None:
    """Record a mark "optimizer step" after each step of an optimizer of torch.

    Does nothing in torch 1 and older, which has no hooks for all optimizers.
    """
    module = sys.modules.get("torch.optim.optimizer")
    register_hook = getattr(module, "register_optimizer_step_post_hook", None)
    is_compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", None)
    if register_hook is None:
        return

    def mark_step(*_: object) -> None:
        # While torch.compile traces the optimizer, the hook must not become a part of the compiled code.
        if is_compiling is None or not is_compiling():
            recorder.mark("optimizer step", 1)

    register_hook(mark_step)


def watch_profiler(report: "Callable[[str], None]") -> None:
    """Report once that the program uses torch.profiler, which cannot record GPU work beside cudakit."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    enable_profiler = getattr(profiler, "_enable_profiler", None)
    if enable_profiler is None:
        return

    def enable_and_report(*args: object, **keyword_arguments: object) -> object:
        profiler._enable_profiler = enable_profiler
        report(
            "the program used torch.profiler, which recorded no GPU work: only one profiler can use CUPTI in"
            " a process, and cudakit was first"
        )
        return enable_profiler(*args, **keyword_arguments)

    profiler._enable_profiler = enable_and_report


def after_import(name: str, action: "Callable[[], None]") -> None:
    """Run an action after the import of a module; at once if it is already imported."""
    if sys.modules.get(name) is not None:
        action()
    else:
        sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook:
    """An import hook that runs an action once, after the import of one module, and then removes itself."""

    def __init__(self, name: str, action: "Callable[[], None]") -> None:
        self._name = name
        self._action = action

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Find the module with the later finders, and let its loader run the action after execution."""
        if name != self._name:
            return None
        later_finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(
            filter(None, (finder.find_spec(name, path, target) for finder in later_finders)), None
        )
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute_module = loader.exec_module
        is_hooked = "exec_module" in vars(loader)  # True if another hook has replaced the method

        def exec_module(module: "ModuleType") -> None:
            if is_hooked:
                loader.exec_module = execute_module
            else:
                del loader.exec_module
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            execute_module(module)
            self._action()

        loader.exec_module = exec_module
        return spec
