from __future__ import annotations

import pytest

from cudakit.core.devices.fields import FieldInfo, named, registry
from cudakit.errors import UsageError
from cudakit.gpu.api.attributes import attributes
from cudakit.gpu.nvml.activity import METRICS
from cudakit.gpu.nvml.facts import FACTS, INSTANCE
from cudakit.gpu.nvml.reader import FieldValue
from cudakit.gpu.nvml.telemetry import TELEMETRY

FIELDS = list(registry().values())
READ = {
    **{
        name: question.identifier if isinstance(question, FieldValue) else question.function
        for name, (question, _) in {**FACTS, **INSTANCE, **TELEMETRY}.items()
    },
    **{name: f"NVML_GPM_METRIC_{metric}" for name, (metric, _) in METRICS.items()},
}


def test_the_registry_has_every_field_that_is_read_and_no_other() -> None:
    described = {field.name for field in FIELDS}
    by_hand = {"cuda_index", "nvml_index", "uuid", "pci_bus_id", "notes", "usable_memory_bytes"}

    assert described == READ.keys() | {each.name for each in attributes()} | by_hand


@pytest.mark.parametrize("name", READ)
def test_a_field_of_nvml_names_the_call_that_it_comes_from(name: str) -> None:
    assert registry()[name].source == READ[name]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_is_described_in_a_few_words_and_ends_in_its_unit(field: FieldInfo) -> None:
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
        "B/s": "_bytes_per_s",
    }.get(field.unit, "")
    assert field.name.endswith(suffix)


def test_there_are_as_many_attributes_as_cuda_has() -> None:
    numbers = [attribute.number for attribute in attributes()]

    assert numbers == sorted(set(numbers))
    assert len(numbers) > 150


def test_attributes_have_the_numbers_of_the_driver() -> None:
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


def test_fields_are_found_in_the_order_in_which_they_are_named() -> None:
    assert [field.name for field in named(["uuid", "name"])] == ["uuid", "name"]


def test_an_unknown_field_is_refused_with_what_was_probably_meant() -> None:
    with pytest.raises(UsageError, match="no field 'power_drw_w'") as failure:
        named(["name", "power_drw_w"])

    assert "power_draw_w" in failure.value.hint
    assert "--list-fields" in failure.value.hint
