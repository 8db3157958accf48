from __future__ import annotations

import pytest
from core.devices.diagnose.machines import OK, WARN, Machine, judged

NAME = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "max_split_size_mb:128, garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False",
        "backend:cudaMallocAsync",
        "max_split_size_mb:128,",
    ],
)
def test_settings_that_pytorch_knows_are_well(machine: Machine, value: str) -> None:
    found = judged("CK021", machine(environment={NAME: value}))

    assert found.status is OK
    assert found.evidence == {NAME: value}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("expandable_segment:True", "PyTorch knows no key 'expandable_segment'"),
        ("expandable_segments", "expandable_segments takes True or False, not ''"),
        ("expandable_segments:true", "takes True or False, not 'true'"),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "the other keys do nothing"),
    ],
)
def test_settings_that_stop_a_program_or_do_nothing_are_pointed_out(
    machine: Machine, value: str, words: str
) -> None:
    found = judged("CK021", machine(environment={NAME: value}))

    assert found.status is WARN
    assert words in found.summary


def test_of_two_names_that_disagree_one_wins(machine: Machine) -> None:
    both = {NAME: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}

    found = judged("CK021", machine(environment=both))

    assert found.summary == f"both {NAME} and PYTORCH_ALLOC_CONF are set; {NAME} wins"


def test_two_names_that_agree_are_well(machine: Machine) -> None:
    same = dict.fromkeys((NAME, "PYTORCH_ALLOC_CONF"), "expandable_segments:True")

    assert judged("CK021", machine(environment=same)).status is OK
