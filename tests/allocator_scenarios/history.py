"""Scenarios 43 to 48: the trace and its stacks."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Mapping
from typing import Any

from allocator_scenarios.scenario import MIB, Check, Scenario, Steps, Subject, scenario

SIZE = 311 * 411 * 4
SKIPPABLE = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


def take(s: Subject) -> int:
    return s.alloc(SIZE)


def give(s: Subject, ptr: int) -> None:
    s.free(ptr)


def make_empty(s: Subject) -> None:
    s.empty_cache()


def trace(s: Subject) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = s.snapshot()["device_traces"][0]
    return found


def names(entry: Mapping[str, Any]) -> set[str]:
    return {frame["name"] for frame in entry.get("frames", ())}


@scenario(43, "the stack of a live block")
def state(s: Subject) -> Steps:
    s.record("state", context="all", clear=True)
    ptr = take(s)
    (segment,) = s.snapshot()["segments"]
    block = segment["blocks"][0]
    facts = {
        "address": block["address"] == ptr,
        "function": "take" in names(block),
        "file": any(frame["filename"] == __file__ for frame in block["frames"]),
    }
    yield Check("live", facts=facts)
    give(s, ptr)
    s.empty_cache()
    yield Check("emptied", facts={"last": trace(s)[-1]["action"] == "segment_free"})


def contexts(context: str | None) -> Scenario:
    @scenario(44, f"stacks of context {context}")
    def steps(s: Subject) -> Steps:
        s.record(None)
        s.record("all", context=context, clear=True)
        give(s, take(s))
        make_empty(s)
        seen = {name for entry in trace(s) for name in names(entry)}
        facts = {
            "allocation": ("take" in seen) == (context in ("alloc", "all")),
            "free": ("give" in seen) == (context == "all"),
            "empty cache": ("make_empty" in seen) == (context == "all"),
        }
        yield Check("emptied", facts=facts)

    return steps


def skipped(action: str) -> Scenario:
    @scenario(45, f"a trace without {action}")
    def steps(s: Subject) -> Steps:
        s.record("all", skip=[action], clear=True)
        give(s, take(s))
        s.empty_cache()
        wanted = [name for name in ALL_OF_THEM if name != action]
        found = [entry["action"] for entry in trace(s)]
        yield Check("emptied", facts={"others": found == wanted})

    return steps


ALL_OF_THEM = ("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free")


@scenario(45, "metadata, and a part without stacks")
def metadata(s: Subject) -> Steps:
    s.record("all", context="all", clear=True)
    s.metadata("step 1")
    ptr = take(s)
    s.metadata("")
    s.record("all", context=None)
    second = take(s)
    s.record("all", context="all")
    give(s, ptr)
    give(s, second)
    entries = trace(s)
    facts = {
        "metadata": [entry["user_metadata"] for entry in entries] == ["step 1"] * 2 + [""] * 5,
        "stacks": ["take" in names(entry) for entry in entries][:3] == [True, True, False],
    }
    yield Check("given", facts=facts)


@scenario(46, "the latest entries are kept")
def ring(s: Subject) -> Steps:
    s.record("all", max_entries=10, clear=True)
    for number in range(1, 9):
        s.free(s.alloc(512 * number))
    entries = trace(s)
    sizes = [entry["size"] // 512 for entry in entries]
    facts = {
        "latest": sizes == [5, 6, 6, 6, 7, 7, 7, 8, 8, 8],
        "in order": [e["time_us"] for e in entries] == sorted(e["time_us"] for e in entries),
    }
    yield Check("ten", facts=facts)


@scenario(47, "a trace leads to its snapshot")
def folded(s: Subject) -> Steps:
    rng = random.Random(1)
    live: list[int] = []
    for _ in range(400):
        if live and rng.random() < 0.45:
            s.free(live.pop(rng.randrange(len(live))))
        elif rng.random() < 0.02:
            s.empty_cache()
        else:
            live.append(s.alloc(rng.randint(1, 12 * MIB), rng.choice(("", "s1"))))
    snapshot = s.snapshot()
    segments = {seg["address"]: seg["total_size"] for seg in snapshot["segments"]}
    blocks = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    closes = fold(snapshot["device_traces"][0]) == (segments, blocks)
    yield Check("folded", facts={"closes": closes})


def fold(entries: list[dict[str, Any]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the segments and blocks at the end of a trace."""
    segments: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for entry in entries:
        match entry["action"]:
            case "segment_alloc":
                segments[entry["addr"]] = entry["size"]
            case "segment_free":
                del segments[entry["addr"]]
            case "alloc":
                blocks[entry["addr"]] = entry["size"]
            case "free_completed":
                del blocks[entry["addr"]]
    return segments, blocks


@scenario(48, "a snapshot can be kept")
def kept(s: Subject) -> Steps:
    s.record("all", context="all", clear=True)
    give(s, take(s))
    take(s)
    snapshot = s.snapshot()
    again = pickle.loads(pickle.dumps(snapshot))  # noqa: S301
    facts = {"json": json.dumps(snapshot) != "", "pickle": again == snapshot}
    yield Check("kept", facts=facts)


HISTORY = (
    state,
    *(contexts(context) for context in (None, "state", "alloc", "all")),
    *(skipped(action) for action in SKIPPABLE),
    metadata,
    ring,
    folded,
    kept,
)
