"""PyTorch's allocator as a subject. Nothing here needs PyTorch's random numbers, or one of its workspaces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from allocator_scenarios.gate import Gate
from allocator_scenarios.subject import DEFAULT, STREAMS, CannotRun
from allocator_scenarios.torch_pools import TorchPools

DEVICE = 0
# What lives on from one configuration to the next unless it is said again, and its default.
PERSISTENT = {
    "expandable_segments": "False",
    "release_lock_on_cudamalloc": "False",
    "graph_capture_record_stream_reuse": "False",
    "large_segment_size_mb": "20",
}


class Torch(TorchPools):
    """PyTorch's caching allocator in this process, through tensors and raw pointers."""

    name = "PyTorch"

    def __init__(self, gpu: Any) -> None:
        super().__init__()
        torch.cuda.set_device(DEVICE)
        torch.cuda.init()
        # PyTorch keeps free blocks by the handles of their streams.
        made = sorted((torch.cuda.Stream(DEVICE) for _ in range(16)), key=_handle)
        self._streams = dict(zip(STREAMS, made, strict=False))
        self._gates = {name: Gate(gpu) for name in STREAMS}
        self._lanes = {
            name: torch.cuda.ExternalStream(int(gpu.handle(gate.lane)), device=DEVICE)
            for name, gate in self._gates.items()
        }
        self._tensors: dict[int, torch.Tensor] = {}
        self._raw: set[int] = set()
        self._used: dict[int, set[str]] = {}
        self._busy: set[str] = set()
        self._persistent: set[str] = set()
        self._observers: list[Callable[[], None]] = []
        # What is oversize is counted by the limit of the moment: after another one was set, for ever wrong.
        self._drift: dict[str, int] = {}
        torch._C._cuda_attach_out_of_memory_observer(self._tell)

    # The scenario.

    def begin(self, settings: str) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        held = torch.cuda.memory_stats(DEVICE)
        self._drift = {name: n for name, n in held.items() if name.startswith("oversize_")}
        left = {name: n for name, n in self.statistics().items() if n and name != "max_split_size"}
        if left:
            raise RuntimeError(f"PyTorch's allocator is not empty: {left}")
        if settings:
            self._configure_or_say(settings)
        self.record(clear=True)

    def end(self) -> None:
        for stream in list(self._busy):
            self.settle(stream)
        self._observers.clear()
        self.caching(enabled=True)
        self.limit(1.0)
        for ptr in [*self._tensors, *self._raw]:
            self.free(ptr)
        self.drop_all()
        torch.cuda.memory._record_memory_history(None)
        self.metadata("")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.configure("")

    # Memory.

    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        if raw:
            ptr = torch.cuda.caching_allocator_alloc(size_bytes, DEVICE, self._handle(stream))
            self._raw.update([ptr] if ptr else [])
            return int(ptr)
        with torch.cuda.stream(self._stream(stream)):
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{DEVICE}")
        ptr = tensor.data_ptr()
        if ptr:
            self._tensors[ptr] = tensor
        return ptr

    def attempt(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        try:
            return self.alloc(size_bytes, stream, raw=raw)
        except torch.OutOfMemoryError:
            return 0

    def refusal(self, size_bytes: int, stream: str = DEFAULT) -> str:
        try:
            self.free(self.alloc(size_bytes, stream))
        except torch.OutOfMemoryError as error:
            return str(error)
        return ""

    def free(self, ptr: int) -> None:
        if self._tensors.pop(ptr, None) is None:  # which was the last reference, where there is one
            self._raw.discard(ptr)
            torch.cuda.caching_allocator_delete(ptr)
        used = self._used.pop(ptr, set())
        if not self.capturing:
            for stream in used - self._busy:
                self._streams[stream].synchronize()

    def refuses_to_free(self, ptr: int) -> bool:
        try:
            torch.cuda.caching_allocator_delete(ptr)
        except RuntimeError:
            return True
        return False

    def use(self, ptr: int, stream: str) -> None:
        self._tensors[ptr].record_stream(self._stream(stream))
        self._used.setdefault(ptr, set()).add(stream)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    # Work.

    def busy(self, stream: str) -> None:
        self._busy.add(stream)
        self._gates[stream].close()
        self._streams[stream].wait_stream(self._lanes[stream])

    def settle(self, stream: str) -> None:
        self._busy.discard(stream)
        self._gates[stream].open()
        self._streams[stream].synchronize()

    def join(self, stream: str, other: str) -> None:
        self._stream(stream).wait_stream(self._stream(other))

    def work(self, stream: str) -> None:
        with torch.cuda.stream(self._stream(stream)):
            torch.cuda._sleep(1)

    # Settings and limits.

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(DEVICE)[1])

    def configure(self, settings: str) -> None:
        named = {key for key in PERSISTENT if f"{key}:" in settings}
        again = [f"{key}:{PERSISTENT[key]}" for key in sorted(self._persistent - named)]
        self._persistent = named
        _set(",".join([*([settings] if settings else []), *again]))

    def _configure_or_say(self, settings: str) -> None:
        try:
            self.configure(settings)
        except (RuntimeError, ValueError) as error:
            self._persistent.clear()
            raise CannotRun(f"PyTorch refuses {settings}: {error}") from None

    def refuses(self, settings: str) -> bool:
        try:
            _set(settings)
        except (RuntimeError, ValueError):
            return True
        finally:
            self.configure("")
        return False

    def limit(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)

    def fraction(self) -> float:
        return float(torch.cuda.get_per_process_memory_fraction(DEVICE))

    def limit_error(self, fraction: Any) -> str:
        try:
            torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return ""

    def caching(self, *, enabled: bool) -> None:
        torch.cuda.caching_allocator_enable(enabled)

    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        self._observers.append(observer)

    # What is known.

    def statistics(self) -> dict[str, int]:
        found = torch.cuda.memory_stats(DEVICE)
        return {name: n - self._drift.get(name, 0) for name, n in found.items()}

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.cuda.memory._snapshot()
        return found

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(DEVICE)

    def reset_sums(self) -> None:
        torch.cuda.reset_accumulated_memory_stats(DEVICE)

    def record(
        self,
        history: Any = "all",
        *,
        context: Any = None,
        max_entries: int = 1 << 40,
        skip: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        more = {"skip_actions": list(skip)} if skip else {}
        try:
            torch.cuda.memory._record_memory_history(
                history,
                context=context,
                stacks="python",
                max_entries=max_entries,
                clear_history=clear,
                **more,
            )
        except TypeError as error:
            raise CannotRun(f"this PyTorch records otherwise: {error}") from None

    def metadata(self, text: str) -> None:
        torch.cuda.memory._set_memory_metadata(text)

    def stream_names(self) -> dict[int, str]:
        return {_handle(stream): name for name, stream in self._streams.items()}

    def _stream(self, name: str) -> Any:
        return self._streams[name] if name else torch.cuda.default_stream(DEVICE)

    def _handle(self, name: str) -> int:
        return _handle(self._stream(name))

    def _tell(self, *_: object) -> None:
        for observer in self._observers:
            observer()

    @contextmanager
    def _on(self, stream: str) -> Iterator[int]:
        with torch.cuda.stream(self._stream(stream)):
            yield self._handle(stream)

    def _tensor(self, ptr: int) -> Any:
        return self._tensors[ptr]

    def _forget(self, ptrs: Collection[int]) -> None:
        """Drop tensors whose memory is not theirs any more."""
        for ptr in ptrs:
            del self._tensors[ptr]

    def _adopt(self, ptrs: Collection[int]) -> None:
        """Free by their address what has no tensor any more."""
        self._raw.update(ptr for ptr in ptrs if ptr not in self._tensors)


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream)


def _set(settings: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)
