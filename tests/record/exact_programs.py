"""Runs programs with patched kernels, and returns the launches in their traces."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from record.recorded import event_bodies, recorded
from record.test_machine_code import Image

from cudakit.trace.events import Access, Accessed, Event, Gap, GraphLaunch, Launch
from cudakit.trace.kinds import AccessMode, Precision

PATCHES = ((90, b"a patch"),)
# Operation codes of instructions in machine code.
LOADS, TENSOR_STORES, TENSOR_REDUCTIONS, TEXTURES, MULTIMEM = 0x981, 0x3B5, 0x3B6, 0xB60, 0x9A4


def cubin() -> bytes:
    """Return a module of kernels with one kind of unreported access each, except the first."""
    image = Image()
    image.code("plain", LOADS)
    image.code("textures", LOADS, TEXTURES)
    image.code("stores", LOADS, TENSOR_STORES)
    image.code("reduces", LOADS, TENSOR_REDUCTIONS)
    image.code("multimem", LOADS, MULTIMEM)
    return image.file()


BEGIN = f"""
CUBIN = {cubin()!r}
MODULE = P(0x5000)
READ, WRITE = 1, 2

class Touch(ctypes.Structure):
    _fields_ = [("address", U), ("stride", U), ("count", U), ("bytes", ctypes.c_uint32),
                ("flags", ctypes.c_uint32)]

held = []
def set_accesses(*each, result=0):
    all = (Touch * len(each))(*each)
    held.append(all)
    cuda.set_next_accesses(all, len(all), result)

def read(address, size=4, *, stride=0, count=1):
    return Touch(address, stride, count, size, READ)

def write(address, size=4, *, stride=0, count=1):
    return Touch(address, stride, count, size, WRITE)

plain, textures, multimem = (Kernel(name, 1, (0,), (8,)) for name in (b"plain", b"textures", b"multimem"))
def launch(*each, stream=STREAM, kernel=plain, pointer=0x100000, result=0, context=CONTEXT):
    set_accesses(*each, result=result)
    cuda.launch(context, stream, ctypes.byref(kernel), pointers(pointer), None)

def wait(stream=STREAM, context=CONTEXT):
    cuda.synchronize(1, context, stream)

def load_module(module=MODULE, context=CONTEXT):
    cuda.load_module(context, module, CUBIN, ctypes.c_size_t(len(CUBIN)))

memory(ALLOC, 0x100000, 0x100000)
load_module()
"""

# heap_bytes() returns the number of bytes that the process has allocated on the heap; 0 if the C library
# does not count them.
HEAP_BYTES = """
class HeapUse(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost")]
libc = ctypes.CDLL(None)
def heap_bytes():
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = HeapUse
    use = libc.mallinfo2()
    return use.uordblks + use.hblkhd
"""


@dataclass
class RecordedLaunch:
    """The accesses of one launch in a trace."""

    pending: int
    assumed: list[Access] = field(default_factory=list)
    accesses: list[tuple[int, int, AccessMode, int]] = field(
        default_factory=list
    )  # (first address, end address, mode, node id)
    precisions: set[Precision] = field(default_factory=set)
    ended_nodes: list[tuple[int, bool]] = field(default_factory=list)  # (node id, is exact)


def recorded_launches(events: list[Event]) -> list[RecordedLaunch]:
    """Return the accesses of each launch, of kernels and graphs, in order."""
    launches = {
        event.seq: RecordedLaunch(event.body.pending)
        for event in events
        if isinstance(event.body, Launch | GraphLaunch)
    }
    for event in events:
        body, launch_of_event = event.body, launches.get(event.seq)
        if isinstance(body, Accessed):
            assert launch_of_event, "every ACCESSED record belongs to a recorded launch"
            launch_of_event.ended_nodes.append((body.node, body.exact))
        elif isinstance(body, Access) and launch_of_event and body.precision >= Precision.ASSUMED:
            launch_of_event.assumed.append(body)
        elif isinstance(body, Access) and launch_of_event:
            assert all(node != body.node for node, _ in launch_of_event.ended_nodes), (
                "no access follows the ACCESSED record of its node"
            )
            launch_of_event.accesses.append((body.lo, body.hi, body.mode, body.node))
            launch_of_event.precisions.add(body.precision)
    for launch in launches.values():
        assert len(launch.ended_nodes) == launch.pending, (
            "each pending kernel has one ACCESSED record"
        )
    return list(launches.values())


def gaps(events: list[Event]) -> dict[str, int]:
    """Count the gaps by their text."""
    counts: dict[str, int] = defaultdict(int)
    for gap in event_bodies(events, Gap):
        counts[gap.reason] += gap.count
    return dict(counts)


def run(directory: Path, library: Path, program: str) -> list[Event]:
    """Run a program with a patch, and return the events of its process."""
    return recorded(directory, library, BEGIN + program, patches=PATCHES)
