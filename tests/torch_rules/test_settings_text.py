from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch_rules.all_settings import settings as all_settings

from cudakit.torch_rules.setting_keys import KEYS, Reserve, SettingRefused
from cudakit.torch_rules.settings import Settings, SettingsWarning, effective, parse_config
from cudakit.units import MIB

CUDA, NEUTRAL, OURS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDAKIT_ALLOC_CONF"


def changed(settings: Settings) -> dict[str, Any]:
    return {
        field.name: getattr(settings, field.name)
        for field in fields(Settings)
        if getattr(settings, field.name) != field.default
    }


def refusal(text: str) -> SettingRefused:
    with pytest.raises(SettingRefused) as refused:
        parse_config(text)
    return refused.value


def tried(text: str) -> SettingRefused | None:
    try:
        parse_config(text)
    except SettingRefused as refused:
        return refused
    return None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \t\n", {}),
        ("max_split_size_mb:20", {"max_split_size_bytes": 20 * MIB}),
        ("max_split_size_mb:+0128", {"max_split_size_bytes": 128 * MIB}),
        (
            "max_split_size_mb:12,large_segment_size_mb:12",
            {"max_split_size_bytes": 12 * MIB, "large_segment_size_bytes": 12 * MIB},
        ),
        ("max_non_split_rounding_mb:64", {"max_non_split_rounding_bytes": 64 * MIB}),
        ("garbage_collection_threshold:0.5", {"garbage_collection_threshold": 0.5}),
        ("garbage_collection_threshold:5e-1", {"garbage_collection_threshold": 0.5}),
        ("per_process_memory_fraction:0", {"memory_fraction": 0.0}),
        ("per_process_memory_fraction:.25", {"memory_fraction": 0.25}),
        ("per_process_memory_fraction:1", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False", {}),
        (" expandable_segments : True , ", {"expandable_segments": True}),
        ("backend:native,expandable_segments:True", {"expandable_segments": True}),
        ("backend:cudaMallocAsync", {"backend": "cudaMallocAsync"}),
        (
            "backend:cudaMallocAsync,pinned_num_register_threads:8",
            {"backend": "cudaMallocAsync", "pinned_num_register_threads": 8},
        ),
        ("release_lock_on_hipmalloc:True", {"release_lock_on_cudamalloc": True}),
        ("pinned_use_hip_host_register:True", {"pinned_use_cuda_host_register": True}),
        ("pinned_reserve_segment_size_mb:1", {"pinned_reserve_segment_size_bytes": MIB}),
        ("pinned_max_round_threshold_mb:0", {"pinned_max_round_threshold_bytes": 0}),
        ("expandable_segments_reserve:0.5", {"expandable_segments_reserve": Reserve(value=0.5)}),
        (
            "expandable_segments_reserve_by_class:[serving:0.25,ads_sparse:8G]",
            {
                "expandable_segments_reserve_by_class": (
                    ("serving", Reserve(value=0.25)),
                    ("ads_sparse", Reserve(value=8.0, unit="GiB")),
                )
            },
        ),
    ],
)
def test_valid_settings_parse_as_in_pytorch(text: str, expected: dict[str, Any]) -> None:
    assert changed(parse_config(text)) == expected


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("4", (4,) * 16),
        ("1", (1,) * 16),
        ("[256:1,512:2,>:4]", (1,) * 9 + (2,) + (4,) * 6),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", (8,) * 7 + (2,) * 3 + (1,) * 6),
        ("[256:1,1024:4]", (1,) * 9 + (0, 4) + (0,) * 5),
        ("[ 1:2 , 32768:0, ]", (2,) + (0,) * 15),
        ("[32768:16]", (16,) * 16),
        ("[16384:0,>:8]", (0,) * 15 + (8,)),
    ],
)
def test_divisions_fill_the_same_slots_as_in_pytorch(value: str, slots: tuple[int, ...]) -> None:
    text = f"roundup_power2_divisions:{value}"

    assert parse_config(text).roundup_power2_divisions == slots
    assert parse_config(f"{text},expandable_segments:True").roundup_power2_divisions == slots


@given(all_settings())
def test_settings_survive_writing_and_parsing(settings: Settings) -> None:
    assert parse_config(settings.as_text()) == settings


_tokens = st.sampled_from(
    [*KEYS, *",:[]>", " ", "\n", "True", "False", "0.5", "40G", "20", "1", "-1", "native", "x", "é"]
)


@given(st.one_of(st.text(), st.lists(_tokens).map("".join)))
@example("max_split_size_mb:" + "9" * 5000)
@example("per_process_memory_fraction:" + "9" * 5000)
@example("expandable_segments_reserve:1e999G")
@example("roundup_power2_divisions:" + "1" * 5000)
@example("roundup_power2_divisions:[" + "1" * 5000 + ":1]")
@example("expandable_segments_reserve_by_class:[\ud800:G]")
@example("x" * 100_000)
@example("[" * 10_000)
def test_any_text_parses_or_raises_one_line(text: str) -> None:
    refused = tried(text)
    if refused is not None:
        assert refused.message.startswith(f"{CUDA}, character ")
        assert 1 <= int(refused.message.split()[2].rstrip(":")) <= len(text) + 1
        assert len(f"{refused.message} {refused.hint}".splitlines()) == 1
        assert len(refused.message) < 400


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("foo:1,bar:2", 1, "PyTorch has no setting 'foo'"),
        ("expandable_segment:True", 1, "did you mean 'expandable_segments'?"),
        ("max_split_size:128", 1, "did you mean 'max_split_size_mb'?"),
        ("backend:native,Expandable_Segments:True", 16, "did you mean 'expandable_segments'?"),
        ("roundup_bypass_threshold_mb:64", 1, "PyTorch removed roundup_bypass_threshold_mb"),
        ("garbage_collection_threshold:1.2", 30, "above 0 and below 1, not '1.2'"),
        ("garbage_collection_threshold:0", 30, "above 0 and below 1, not '0'"),
        ("garbage_collection_threshold:nan", 30, "takes a number, not 'nan'"),
        ("garbage_collection_threshold:0.5x", 30, "takes a number, not '0.5x'"),
        ("max_split_size_mb:2", 19, "is 2 MiB; it must be at least the size of a large segment"),
        ("max_split_size_mb:-1", 19, "without a unit, 0 to 8796093022207, not '-1'"),
        ("max_split_size_mb:128MB", 19, "takes a whole number of MiB, without a unit, not '128MB'"),
        ("max_split_size_mb:20.5", 19, "without a unit, not '20.5'"),
        ("max_split_size_mb:8796093022208", 19, "0 to 8796093022207"),
        ("max_split_size_mb:٢٠", 19, "without a unit"),
        ("max_split_size_mb:[20:1]", 19, "without a unit, not a list"),
        ("max_split_size_mb:30,large_segment_size_mb:40", 19, "a large segment, 40 MiB"),
        ("large_segment_size_mb:10", 23, "is 10 MiB; it must be a whole number of MiB, 11 to"),
        ("max_non_split_rounding_mb:19", 27, "is 19 MiB; it must be at least"),
        ("per_process_memory_fraction:-0.1", 29, "is -0.1; it must be a float from 0.0 to 1.0"),
        ("per_process_memory_fraction:1.1", 29, "is 1.1; it must be"),
        ("release_lock_on_cudamalloc:none", 28, "takes True or False, not 'none'"),
        ("expandable_segments:true", 21, "takes True or False, not 'true'"),
        ("pinned_use_cuda_host_register:none", 31, "takes True or False, not 'none'"),
        ("pinned_num_register_threads:none", 29, "takes a whole number, not 'none'"),
        ("pinned_num_register_threads:1024", 29, "is 1024; it must be a power of two, at most 128"),
        ("pinned_reserve_segment_size_mb:0", 32, "takes a whole number of MiB above 0, not '0'"),
        ("backend:hipMallocAsync", 9, "takes native or cudaMallocAsync, not 'hipMallocAsync'"),
        (
            "backend:cudaMallocAsync,max_split_size_mb:128",
            25,
            "max_split_size_mb does nothing with backend:cudaMallocAsync",
        ),
        ("expandable_segments_reserve:abc", 29, "or GiB (40G), not 'abc'"),
        ("expandable_segments_reserve:G", 29, "or GiB (40G), not 'G'"),
        ("expandable_segments_reserve:0", 29, "or GiB (40G), not '0'"),
        ("expandable_segments_reserve:40", 29, "or GiB (40G), not '40'"),
        ("expandable_segments_reserve_by_class:0.5", 38, "takes a list of classes"),
        ("expandable_segments_reserve_by_class:[]", 38, "not an empty one"),
        ("expandable_segments_reserve_by_class:[a:12X]", 41, "or GiB (40G), not '12X'"),
        ("expandable_segments_reserve_by_class:[a:1,a:1]", 43, "the class 'a' is listed twice"),
    ],
)
def test_error_points_at_the_wrong_key_or_value(text: str, at: int, words: str) -> None:
    message = refusal(text).message

    assert message.startswith(f"{CUDA}, character {at}: ")
    assert words in message


@pytest.mark.parametrize(
    ("value", "at", "words"),
    [
        ("0", 1, "takes powers of two, not '0'"),
        ("3", 1, "takes powers of two, not '3'"),
        ("[]", 1, "not an empty list"),
        ("[256:3]", 6, "takes powers of two or 0, not '3'"),
        ("[256:-1]", 6, "takes powers of two or 0, not '-1'"),
        ("[100:2]", 2, "begins at a power of two of MiB, 1 to 32768, or is '>', not '100'"),
        ("[65536:2]", 2, "not '65536'"),
        ("[>:2]", 2, "'>' means all later intervals"),
        ("[1:2,>:2,4:2]", 6, "it must be last"),
        ("[32768:2,>:2]", 10, "'>' means all later intervals"),
        ("[512:2,256:1]", 8, "intervals must increase: 256 comes after 512"),
        ("[512:2,512:1]", 8, "intervals must increase: 512 comes after 512"),
    ],
)
def test_error_points_at_divisions_that_pytorch_parses_differently(
    value: str, at: int, words: str
) -> None:
    key = "roundup_power2_divisions:"
    message = refusal(key + value).message

    assert message.startswith(f"{CUDA}, character {len(key) + at}: ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("expandable_segments", 20, "expected ':' after 'expandable_segments', found the end"),
        ("expandable_segments:", 21, "expected the value of expandable_segments, found the end"),
        ("expandable_segments:,", 21, "expected the value of expandable_segments, found ','"),
        ("expandable_segments=True", 25, "expected ':' after 'expandable_segments=True'"),
        (",expandable_segments:True", 1, "expected the name of a setting, found ','"),
        ("backend:native,,expandable_segments:True", 16, "the name of a setting, found ','"),
        ("backend:native;expandable_segments:True", 9, "not 'native;expandable_segments'"),
        ("backend:native:expandable_segments:True", 15, "expected ',' after 'native', found ':'"),
        ("expandable _segments:True", 11, "there is space inside 'expandable _segments'"),
        ("backend:native expandable_segments:True", 15, "there is space inside"),
        ("backend:native\texpandable_segments:True", 15, "there is space inside"),
        ("backend:native\xa0", 15, "there is space inside 'native\\xa0'"),
        ("roundup_power2_divisions:[256:1", 32, "expected ',' or ']' after '1', found the end"),
        ("roundup_power2_divisions:[256:1,", 33, "expected a pair or ']', found the end"),
        ("roundup_power2_divisions:[256:1]]", 33, "expected ',' after ']', found ']'"),
        ("roundup_power2_divisions:[256]", 30, "expected ':' after '256', found ']'"),
        ("roundup_power2_divisions:[[1:1]]", 27, "expected a pair or ']', found '['"),
    ],
)
def test_error_marks_the_wrong_character(text: str, at: int, words: str) -> None:
    message = refusal(text).message

    assert message.startswith(f"{CUDA}, character {at}: ")
    assert words in message


def test_hint_for_an_unfinished_list_is_the_form_of_a_list() -> None:
    refused = refusal("roundup_power2_divisions:[256:1,512:2")

    assert refused.message.endswith("expected ',' or ']' after '2', found the end")
    assert refused.hint == "write a list as [NAME:VALUE,NAME:VALUE]"


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True,expandable_segments:True",
        "release_lock_on_cudamalloc:True,release_lock_on_hipmalloc:False",
    ],
)
def test_duplicate_key_is_refused(text: str) -> None:
    refused = refusal(text)

    assert refused.message.startswith(f"{CUDA}, character {text.index(',') + 2}: ")
    assert "is set twice, first at character 1" in refused.message


def test_error_names_the_environment_variable() -> None:
    with pytest.raises(SettingRefused, match="CUDAKIT_ALLOC_CONF, character 1:"):
        effective({OURS: "x:1"})


ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.mark.parametrize(
    ("environment", "expandable"),
    [
        ({}, False),
        ({"PATH": "x"}, False),
        ({CUDA: ON}, True),
        ({NEUTRAL: ON}, True),
        ({OURS: ON}, True),
        ({NEUTRAL: ON, CUDA: ON, OURS: ON}, True),
    ],
)
def test_environment_variable_is_parsed(environment: dict[str, str], *, expandable: bool) -> None:
    assert effective(environment) == Settings(expandable_segments=expandable)


@pytest.mark.parametrize(
    ("environment", "expandable", "words"),
    [
        (
            {NEUTRAL: ON, CUDA: OFF},
            False,
            f"{CUDA} and {NEUTRAL} are set; this allocator uses {CUDA}",
        ),
        (
            {NEUTRAL: OFF, CUDA: ON, OURS: OFF},
            False,
            f"{OURS} and {CUDA} are set; this allocator uses {OURS}",
        ),
        ({NEUTRAL: ON, CUDA: ""}, False, f"this allocator uses {CUDA}"),
        ({CUDA: ON, OURS: ""}, False, f"this allocator uses {OURS}"),
        ({NEUTRAL: "not:read", CUDA: ON}, True, f"this allocator uses {CUDA}"),
        ({CUDA: OFF, NEUTRAL: "max_split_size_mb:128"}, False, f"this allocator uses {CUDA}"),
    ],
)
def test_first_of_several_variables_applies_with_a_warning(
    environment: dict[str, str], *, expandable: bool, words: str
) -> None:
    with pytest.warns(SettingsWarning, match=words):
        assert effective(environment) == Settings(expandable_segments=expandable)
