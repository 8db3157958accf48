from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cudakit.bench.report.nvbench import nvbench
from cudakit.errors import UsageError
from cudakit.report.document import Columns, Document, Note, Section

FIGURES = {
    "median_s": np.array([1e-3, np.nan]),
    "mean_s": np.array([1.1e-3, np.nan]),
    "stdev_s": np.array([1.1e-5, np.nan]),
    "q1_s": np.array([0.9e-3, np.nan]),
    "q3_s": np.array([1.2e-3, np.nan]),
    "samples": np.array([50, 0]),
}


def nvbench_document(**axes: Any) -> Any:
    results = Columns(
        "results",
        {"name": np.array([0, 0]), **axes, **FIGURES},
        {"name": ("gemm",), "dtype": ("bf16", "fp8")},
    )
    device = Columns(
        "device",
        {
            "gpu": np.array([0]),
            "compute_capability": np.array([0]),
            "multiprocessors": np.array([132.0]),
            "memory_clock_hz": np.array([3.201e9]),
            "memory_bus_bits": np.array([6016.0]),
            "l2_bytes": np.array([np.nan]),
        },
        {"gpu": ("NVIDIA H200",), "compute_capability": ("9.0",)},
    )
    return json.loads(nvbench(Document("bench gemm", (results, Section("s", (device,))))))


def summaries(state: Any) -> dict[str, str]:
    return {summary["tag"]: summary["data"][0]["value"] for summary in state["summaries"]}


def test_nvbench_document_has_format_version() -> None:
    assert nvbench_document()["meta"]["version"]["json"]["string"] == "1.0.0"


def test_case_is_nvbench_state_with_axes() -> None:
    benchmark = nvbench_document(m=np.array([64, 128]), dtype=np.array([0, -1]))["benchmarks"][0]

    assert benchmark["name"] == "gemm"
    assert [(axis["name"], axis["type"]) for axis in benchmark["axes"]] == [
        ("m", "int64"),
        ("dtype", "string"),
    ]
    assert [value["value"] for value in benchmark["axes"][0]["values"]] == [64, 128]
    first, second = benchmark["states"]
    assert first["name"] == "Device=0 m=64 dtype=bf16"
    assert first["axis_values"][0] == {"name": "m", "type": "int64", "value": "64"}
    assert second["name"] == "Device=0 m=128"


def test_nvbench_summaries_have_tags_of_its_scripts() -> None:
    values = summaries(nvbench_document()["benchmarks"][0]["states"][0])

    assert values["nv/cold/sample_size"] == "50"
    assert float(values["nv/cold/time/gpu/mean"]) == 1.1e-3
    assert float(values["nv/cold/time/gpu/stdev/relative"]) == pytest.approx(0.01)
    assert float(values["nv/cold/time/gpu/iqr/absolute"]) == pytest.approx(0.3e-3)
    assert float(values["nv/cold/time/gpu/iqr/relative"]) == pytest.approx(0.3)
    assert "nv/cold/sm_clock_rate/mean" not in values


def test_case_without_time_is_skipped_state() -> None:
    state = nvbench_document()["benchmarks"][0]["states"][1]

    assert (state["is_skipped"], state["summaries"]) == (True, [])
    assert state["skip_reason"]


def test_unknown_device_properties_are_zero() -> None:
    (device,) = nvbench_document()["devices"]

    assert (device["name"], device["sm_version"]) == ("NVIDIA H200", 900)
    assert device["global_memory_bus_bandwidth"] == pytest.approx(4.814e12, rel=1e-3)
    assert device["l2_cache_size"] == 0


def test_hostile_name_is_escaped_in_nvbench_json() -> None:
    results = Columns(
        "results",
        {"name": np.array([0]), **{k: v[:1] for k, v in FIGURES.items()}},
        {"name": ('"},{\ud800',)},
    )
    text = nvbench(Document("T", (results,)))

    assert text.encode()
    assert json.loads(text)["benchmarks"][0]["name"] == '"},{\ud800'


def test_document_without_results_is_rejected() -> None:
    without_figures = Columns("results", {"size": np.arange(3)})
    for node in (Note("ok", "nothing"), without_figures):
        with pytest.raises(UsageError, match="no results"):
            nvbench(Document("T", (node,)))
