""""""

from __future__ import annotations

import pytest

from cudakit.devices.result import field_registry, fields_by_name
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import BIT_NAMES, FieldInfo, attributes
from cudakit.gpu.nvml import METRICS
from cudakit.gpu.nvml.readings import (
    FACT_READINGS,
    INSTANCE_READINGS,
    TELEMETRY_READINGS,
    FieldValue,
)

FIELDS = list(field_registry().values())
READ = {
    **{
        name: question.identifier if isinstance(question, FieldValue) else question.function
        for name, (question, _) in {
            **FACT_READINGS,
            **INSTANCE_READINGS,
            **TELEMETRY_READINGS,
        }.items()
    },
    **{name: field.source for name, field in METRICS.items()},
}


def test_registry_lists_exactly_the_fields_read() -> None:
    described = {field.name for field in FIELDS}
    by_hand = {"cuda_index", "nvml_index", "uuid", "pci_bus_id", "notes", "usable_memory_bytes"}

    assert described == READ.keys() | {each.name for each in attributes()} | by_hand


@pytest.mark.parametrize("name", READ)
def test_nvml_field_names_its_call(name: str) -> None:
    assert field_registry()[name].source.split(", cuDevice")[0] == READ[name]


def test_field_of_nvml_and_cuda_names_both_calls() -> None:
    source = field_registry()["compute_mode"].source

    assert source == "nvmlDeviceGetComputeMode, cuDeviceGetAttribute(20)"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_field_has_short_description_and_unit_suffix(field: FieldInfo) -> None:
    assert field.description[0].isupper()
    assert not field.description.endswith(".")
    assert 3 < len(field.description) < 80
    suffix = {
        "bytes": "_bytes",
        "%": "_percent",
        "W": "_w",
        "°C": "_c",
        "MHz": "_mhz",
        "kHz": "_khz",
        "J": "_j",
        "ns": "_ns",
        "us": "_us",
        "bits": "_bits",
        "MB/s": "_mbps",
        "Mbit/s": "_mbps",
        "B/s": "_bytes_per_s",
    }.get(field.unit, "")
    assert field.name.endswith(suffix)


def test_pcie_speed_is_the_bit_rate_of_a_lane() -> None:
    # NVML API Reference, nvmlDeviceGetPcieSpeed: "PCIe Link speed in Mbps". A lane of PCIe 5 has 32 GT/s.
    assert field_registry()["pcie_speed_mbps"].unit == "Mbit/s"


def test_attributes_cover_those_of_cuda() -> None:
    numbers = [attribute.number for attribute in attributes()]

    assert numbers == sorted(set(numbers))
    assert len(numbers) > 150


def test_every_bit_mask_has_names_for_its_bits() -> None:
    assert {each.name for each in attributes() if each.unit == "mask"} == BIT_NAMES.keys()


def test_attribute_numbers_are_those_of_driver() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")

    theirs = {int(each): each.name for each in driver.CUdevice_attribute}
    different = {"pci_bus_number": "PCI_BUS_ID", "pci_device_number": "PCI_DEVICE_ID"}
    different["pci_domain_number"] = "PCI_DOMAIN_ID"
    for attribute in attributes():
        if attribute.number in theirs:
            plain = attribute.name
            for suffix in ("_bytes", "_khz", "_bits"):
                plain = plain.removesuffix(suffix)
            name = different.get(attribute.name, plain.upper())
            assert theirs[attribute.number] == f"CU_DEVICE_ATTRIBUTE_{name}"


def test_fields_are_returned_in_requested_order() -> None:
    assert [field.name for field in fields_by_name(["uuid", "name"])] == ["uuid", "name"]


def test_unknown_field_is_refused_with_similar_names() -> None:
    with pytest.raises(UsageError, match="no field 'power_drw_w'") as failure:
        fields_by_name(["name", "power_drw_w"])

    assert "power_draw_w" in failure.value.hint
    assert "--list-fields" in failure.value.hint
