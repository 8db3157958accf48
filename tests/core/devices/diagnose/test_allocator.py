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
        "release_lock_on_hipmalloc:True",
        "pinned_free_catch_all:True",
    ],
)
def test_settings_that_pytorch_knows_are_well(machine: Machine, value: str) -> None:
    found = judged("CK021", machine(variables={NAME: value}))

    assert found.status is OK
    assert found.evidence == {NAME: value}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("expandable_segment:True", "1: PyTorch knows no key 'expandable_segment'"),
        ("expandable_segments", "20: here should be ':', after 'expandable_segments', not the end"),
        ("expandable_segments:true", "21: expandable_segments takes True or False, not 'true'"),
        ("max_split_size_mb:64,,", "22: here should be the name of a setting, not ','"),
        ("max_split_size_mb:1", "19: max_split_size_mb is 1 MiB; it must be at least"),
        (
            "garbage_collection_threshold:1.5",
            "30: garbage_collection_threshold takes a number above 0 and below 1",
        ),
        ("roundup_bypass_threshold_mb:64", "1: PyTorch has dropped roundup_bypass_threshold_mb"),
        (
            "backend:cudaMallocAsync,max_split_size_mb:128",
            "25: max_split_size_mb does nothing with backend:cudaMallocAsync",
        ),
    ],
)
def test_settings_that_stop_a_program_or_do_nothing_are_pointed_out(
    machine: Machine, value: str, words: str
) -> None:
    found = judged("CK021", machine(variables={NAME: value}))

    assert found.status is WARN
    assert f"{NAME}, character {words}" in found.summary
    assert found.evidence == {NAME: value}


def test_what_the_error_advises_comes_first(machine: Machine) -> None:
    found = judged("CK021", machine(variables={NAME: "roundup_bypass_threshold_mb:64"}))

    assert found.fix == ("leave it out", f"export {NAME}=expandable_segments:True, or unset it")


def test_of_two_names_that_disagree_one_wins(machine: Machine) -> None:
    both = {NAME: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}

    found = judged("CK021", machine(variables=both))

    assert found.summary == f"both {NAME} and PYTORCH_ALLOC_CONF are set; {NAME} wins"


def test_a_name_that_is_set_to_nothing_wins_too(machine: Machine) -> None:
    both = {NAME: "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    assert f"{NAME} wins" in judged("CK021", machine(variables=both)).summary
    assert judged("CK021", machine(variables={NAME: ""})).status is OK


def test_two_names_that_agree_are_well(machine: Machine) -> None:
    same = dict.fromkeys((NAME, "PYTORCH_ALLOC_CONF"), "expandable_segments:True")

    assert judged("CK021", machine(variables=same)).status is OK
