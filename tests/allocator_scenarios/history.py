"""Scenarios 43 to 48: the trace and its stacks."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Mapping
from typing import Any

from allocator_scenarios.scenario import MIB, Check, Scenario, Steps, Subject, scenario

TENSOR_BYTES = 311 * 411 * 4
SKIPPED_ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


def allocate_in_function(subject: Subject) -> int:
    return subject.alloc(TENSOR_BYTES)


def free_in_function(subject: Subject, ptr: int) -> None:
    subject.free(ptr)


def empty_cache_in_function(subject: Subject) -> None:
    subject.empty_cache()


def trace_entries(subject: Subject) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = subject.snapshot()["device_traces"][0]
    return entries


def function_names(entry: Mapping[str, Any]) -> set[str]:
    return {frame["name"] for frame in entry.get("frames", ())}


@scenario(43, "the stack of a live block")
def stack_of_live_block(subject: Subject) -> Steps:
    subject.record_history("state", context="all", clear=True)
    ptr = allocate_in_function(subject)
    (segment,) = subject.snapshot()["segments"]
    block = segment["blocks"][0]
    facts = {
        "address": block["address"] == ptr,
        "function": "allocate_in_function" in function_names(block),
        "file": any(frame["filename"] == __file__ for frame in block["frames"]),
    }
    yield Check("live", facts=facts)
    free_in_function(subject, ptr)
    subject.empty_cache()
    yield Check("emptied", facts={"last": trace_entries(subject)[-1]["action"] == "segment_free"})


def stacks_by_context(context: str | None) -> Scenario:
    @scenario(44, f"stacks of context {context}")
    def steps(subject: Subject) -> Steps:
        subject.record_history(None)
        subject.record_history("all", context=context, clear=True)
        free_in_function(subject, allocate_in_function(subject))
        empty_cache_in_function(subject)
        names_in_trace = {
            name for entry in trace_entries(subject) for name in function_names(entry)
        }
        facts = {
            "allocation": ("allocate_in_function" in names_in_trace)
            == (context in ("alloc", "all")),
            "free": ("free_in_function" in names_in_trace) == (context == "all"),
            "empty cache": ("empty_cache_in_function" in names_in_trace) == (context == "all"),
        }
        yield Check("emptied", facts=facts)

    return steps


def trace_without_action(action: str) -> Scenario:
    @scenario(45, f"a trace without {action}")
    def steps(subject: Subject) -> Steps:
        subject.record_history("all", skip=[action], clear=True)
        free_in_function(subject, allocate_in_function(subject))
        subject.empty_cache()
        expected_actions = [name for name in ALL_ACTIONS if name != action]
        actions = [entry["action"] for entry in trace_entries(subject)]
        yield Check("emptied", facts={"other actions are recorded": actions == expected_actions})

    return steps


ALL_ACTIONS = ("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free")


@scenario(45, "metadata, and entries without stacks")
def metadata_in_trace(subject: Subject) -> Steps:
    subject.record_history("all", context="all", clear=True)
    subject.set_metadata("step 1")
    ptr = allocate_in_function(subject)
    subject.set_metadata("")
    subject.record_history("all", context=None)
    second_ptr = allocate_in_function(subject)
    subject.record_history("all", context="all")
    free_in_function(subject, ptr)
    free_in_function(subject, second_ptr)
    entries = trace_entries(subject)
    facts = {
        "metadata": [entry["user_metadata"] for entry in entries] == ["step 1"] * 2 + [""] * 5,
        "stacks": ["allocate_in_function" in function_names(entry) for entry in entries][:3]
        == [True, True, False],
    }
    yield Check("recorded", facts=facts)


@scenario(46, "the ring keeps the latest entries")
def ring_keeps_latest(subject: Subject) -> Steps:
    subject.record_history("all", max_entries=10, clear=True)
    for number in range(1, 9):
        subject.free(subject.alloc(512 * number))
    entries = trace_entries(subject)
    sizes = [entry["size"] // 512 for entry in entries]
    facts = {
        "latest": sizes == [5, 6, 6, 6, 7, 7, 7, 8, 8, 8],
        "in order": [e["time_us"] for e in entries] == sorted(e["time_us"] for e in entries),
    }
    yield Check("ten", facts=facts)


@scenario(47, "replaying the trace gives the snapshot")
def trace_replays_to_snapshot(subject: Subject) -> Steps:
    rng = random.Random(1)
    live: list[int] = []
    for _ in range(400):
        if live and rng.random() < 0.45:
            subject.free(live.pop(rng.randrange(len(live))))
        elif rng.random() < 0.02:
            subject.empty_cache()
        else:
            live.append(subject.alloc(rng.randint(1, 12 * MIB), rng.choice(("", "s1"))))
    snapshot = subject.snapshot()
    segments = {seg["address"]: seg["total_size"] for seg in snapshot["segments"]}
    blocks = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    equals_snapshot = replay_trace(snapshot["device_traces"][0]) == (segments, blocks)
    yield Check("replayed", facts={"equals the snapshot": equals_snapshot})


def replay_trace(entries: list[dict[str, Any]]) -> tuple[dict[int, int], dict[int, int]]:
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


@scenario(48, "a snapshot can be pickled and written as JSON")
def snapshot_serialized(subject: Subject) -> Steps:
    subject.record_history("all", context="all", clear=True)
    free_in_function(subject, allocate_in_function(subject))
    allocate_in_function(subject)
    snapshot = subject.snapshot()
    unpickled = pickle.loads(pickle.dumps(snapshot))  # noqa: S301
    facts = {"json": json.dumps(snapshot) != "", "pickle": unpickled == snapshot}
    yield Check("serialized", facts=facts)


HISTORY = (
    stack_of_live_block,
    *(stacks_by_context(context) for context in (None, "state", "alloc", "all")),
    *(trace_without_action(action) for action in SKIPPED_ACTIONS),
    metadata_in_trace,
    ring_keeps_latest,
    trace_replays_to_snapshot,
    snapshot_serialized,
)
