"""Tests of the causes that are reported for programs that run out of memory for a known reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from memory.verdict import programs
from memory.verdict.programs import DEVICE, Gpu

from cudakit.allocator.oom import OutOfMemory
from cudakit.api.memory import new_allocator
from cudakit.memory.analyze import analyze
from cudakit.memory.result import Oom
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import POOL_IDS, Snapshot
from cudakit.torch_rules.settings import Settings, parse_config

PROGRAMS: list[tuple[str, Callable[[Gpu], None], Mapping[str, Any]]] = [
    ("retained", programs.kept_outputs, {}),
    ("retained", programs.hidden_state_with_graph, {}),
    ("retained", programs.kept_exceptions, {}),
    ("retained", programs.sum_of_losses, {}),
    ("retained", programs.gradients_of_every_step, {}),
    ("retained", programs.hooks_keep_activations, {}),
    ("retained", programs.graph_for_every_shape, {}),
    ("retained", programs.tensors_in_a_list, {}),
    ("growth", programs.key_value_cache, {}),
    ("growth", programs.longer_sequences, {}),
    ("growth", programs.search_for_batch_size, {}),
    ("one_off_peak", programs.evaluation_batch, {}),
    ("one_off_peak", programs.attention_of_long_prompt, {}),
    ("one_off_peak", programs.copy_for_checkpoint, {}),
    ("one_off_peak", programs.first_optimizer_step, {}),
    ("request_too_large", programs.request_of_all_distances, {}),
    (
        "process_limit",
        programs.larger_step_than_the_limit,
        {"settings": Settings(memory_fraction=0.2)},
    ),
    ("other_processes", programs.train_steadily, {"outside": 3 * DEVICE // 4}),
    ("fragmentation", programs.small_results_between_activations, {}),
    ("fragmentation", programs.blocks_of_another_stream, {}),
    ("fragmentation", programs.replay_buffer_of_varying_sizes, {}),
    ("fragmentation", programs.requests_of_varying_lengths, {}),
    ("capacity", programs.deep_network, {}),
]


def snapshot_of_failure(program: Callable[[Gpu], None], **options: Any) -> Snapshot:
    """Run a program that runs out of memory, and return its snapshot."""
    gpu = Gpu(**options)
    assert not programs.run(program, gpu)
    return gpu.snapshot()


def explain_last_failure(snapshot: Snapshot) -> Oom:
    return analyze([snapshot], MemorySpec(), new_allocator).devices[0].ooms[-1]


@pytest.mark.parametrize(
    ("cause", "program", "options"), PROGRAMS, ids=[program.__name__ for _, program, _ in PROGRAMS]
)
def test_first_cause_is_the_known_cause_of_the_program(
    cause: str, program: Callable[[Gpu], None], options: Mapping[str, Any]
) -> None:
    oom = explain_last_failure(snapshot_of_failure(program, **options))

    assert oom.causes[0].id == cause
    assert oom.causes[0].sufficient
    assert oom.sentence.endswith(f"{oom.causes[0].sentence}.")
    assert oom.remedies


@pytest.mark.parametrize(
    "program",
    [programs.replay_buffer_of_varying_sizes, programs.requests_of_varying_lengths],
    ids=lambda program: program.__name__,
)
def test_recommended_setting_lets_the_program_run(program: Callable[[Gpu], None]) -> None:
    oom = explain_last_failure(snapshot_of_failure(program))

    (recommended,) = [replayed for replayed in oom.replays if replayed.recommended]
    assert recommended.settings is not None
    assert f"PYTORCH_CUDA_ALLOC_CONF={recommended.settings}" in oom.remedies[0]
    assert programs.run(program, Gpu(settings=parse_config(recommended.settings)))


@pytest.mark.parametrize(
    ("cause", "program", "options"), PROGRAMS, ids=[program.__name__ for _, program, _ in PROGRAMS]
)
def test_settings_are_recommended_against_fragmentation_only(
    cause: str, program: Callable[[Gpu], None], options: Mapping[str, Any]
) -> None:
    oom = explain_last_failure(snapshot_of_failure(program, **options))

    recommended = [replayed for replayed in oom.replays if replayed.recommended]
    assert all(replayed.helps and replayed.cause == cause for replayed in recommended)
    can_help = cause == "fragmentation" and oom.verdict != "pool"
    assert can_help or not any(replayed.settings for replayed in recommended)


def test_program_ends_where_its_setting_helps_and_fails_again_where_it_does_not() -> None:
    """The failed request of the program itself agrees with every replay."""
    program = programs.small_results_between_activations
    oom = explain_last_failure(snapshot_of_failure(program))

    assert {replayed.helps for replayed in oom.replays} == {False, True}
    for replayed in oom.replays:
        assert replayed.settings is not None
        gpu = Gpu(settings=parse_config(replayed.settings))
        assert programs.run(program, gpu) == replayed.helps, replayed.change


def test_retained_call_site_is_the_one_that_accumulates() -> None:
    cause = explain_last_failure(snapshot_of_failure(programs.gradients_of_every_step)).causes[0]

    assert cause.stack[1].name in ("<listcomp>", "gradients_of_every_step")
    assert cause.bytes > DEVICE // 2


def test_growing_cache_is_growth_of_the_call_that_appends() -> None:
    cause = explain_last_failure(snapshot_of_failure(programs.key_value_cache)).causes[0]

    assert cause.stack[1].name == "_append"


def test_other_processes_are_not_reported_without_the_memory_of_the_device() -> None:
    gpu = Gpu(outside=3 * DEVICE // 4)
    assert not programs.run(programs.train_steadily, gpu)

    oom = explain_last_failure(gpu.snapshot(with_total=False))
    assert oom.device_total_bytes is None
    assert "other_processes" not in [cause.id for cause in oom.causes]


def test_memory_of_another_library_is_named_and_not_counted_as_reserved() -> None:
    def program(gpu: Gpu) -> None:
        data = gpu.allocator.graph_pool_handle()
        gpu.allocator.begin_allocate_to_pool(data, lambda _stream: True)
        array = gpu.empty(0.75)
        gpu.allocator.end_allocate_to_pool(data)
        programs.train_steadily(gpu)
        del array

    snapshot = snapshot_of_failure(program)
    pools = tuple(POOL_IDS["cupy"] if pool != (0, 0) else pool for pool in snapshot.pools)
    oom = explain_last_failure(replace(snapshot, pools=pools))

    assert oom.causes[0].id == "other_processes"
    assert oom.causes[0].bytes >= int(0.75 * DEVICE)
    assert "6.00 GiB by cupy in this process" in oom.causes[0].sentence
    assert "other processes" not in oom.causes[0].sentence


def test_limit_is_raised_in_the_unit_of_its_call() -> None:
    oom = explain_last_failure(
        snapshot_of_failure(
            programs.larger_step_than_the_limit, settings=Settings(memory_fraction=0.2)
        )
    )

    remedy = oom.remedies[0]
    assert "to a fraction of at least 0.2" in remedy
    assert "set_per_process_memory_fraction" in remedy
    assert "(replayed: the request fits, peak reserved " in remedy


def test_memory_of_other_processes_would_serve_the_request() -> None:
    oom = explain_last_failure(
        snapshot_of_failure(programs.train_steadily, outside=3 * DEVICE // 4)
    )

    (recommended,) = [replayed for replayed in oom.replays if replayed.recommended]
    assert recommended.change == "the 6.00 GiB outside this allocator"
    assert recommended.peak_reserved_bytes > DEVICE // 4


def test_figures_of_all_causes_are_of_the_moment_of_the_failure() -> None:
    for _, program, options in PROGRAMS:
        oom = explain_last_failure(snapshot_of_failure(program, **options))
        for cause in oom.causes:
            assert 0 <= cause.bytes <= max(2 * DEVICE, oom.device_free_bytes), cause


def test_reports_on_cudakits_own_allocator_name_no_call_of_pytorch() -> None:
    for _, program, options in PROGRAMS:
        gpu = Gpu(**options)
        assert not programs.run(program, gpu)
        oom = explain_last_failure(gpu.snapshot(with_total=False))
        texts = [oom.sentence, *oom.remedies, *(cause.remedy for cause in oom.causes)]
        for text in texts:
            assert "torch" not in text.lower().replace("/torch/", "").replace("torch.cat", ""), text


def test_limit_in_advice_is_never_below_what_was_reserved_before() -> None:
    """The figures of one report agree: the limit was at least the most that was ever reserved."""
    gpu = Gpu(settings=Settings(memory_fraction=0.2))
    assert not programs.run(programs.larger_step_than_the_limit, gpu)
    device = analyze([gpu.snapshot(with_total=False)], MemorySpec(), new_allocator).devices[0]

    remedy = device.ooms[-1].causes[0].remedy
    factor = float(remedy.split(" times")[0].split()[-1])
    highest = device.peak.highest_reserved_bytes
    needed = device.ooms[-1].state.reserved_bytes + device.ooms[-1].size_bytes
    assert factor * highest >= needed
    assert factor > 1


def test_causes_of_failures_before_the_last_five_need_no_history() -> None:
    def retries(gpu: Gpu) -> None:
        long_lived = [gpu.empty(0.05) for _ in range(15)]
        for _ in range(8):
            with suppress(OutOfMemory):
                gpu.empty(0.5)
        del long_lived

    gpu = Gpu()
    retries(gpu)
    ooms = analyze([gpu.snapshot()], MemorySpec(), new_allocator).devices[0].ooms
    assert len(ooms) == 8
    assert all(oom.causes for oom in ooms)
    assert {oom.causes[0].id for oom in ooms[:3]} == {"capacity"}
    assert {oom.causes[0].id for oom in ooms[3:]} != {"capacity"}
    assert [bool(oom.replays) for oom in ooms] == [False] * 7 + [True]
