"""The rule which files are libraries', and which frame of a call stack is the user's line."""

from __future__ import annotations

import ctypes

import pytest

from cudakit.stacks import (
    BACKWARD_FRAME,
    LIBRARY_FILE,
    TYPED_CODE,
    Frame,
    call_site_index,
    is_backward,
    is_library,
    library_name,
)

PROGRAM_FILES = [
    "/home/user/train.py",
    "train.py",
    "/home/user/lib/tools.py",
    "/home/user/lib/python3_tools/train.py",
    "/home/user/my-site-packages/tools.py",
    "/home/user/site-packages.py",
    "/usr/lib/python3.12-extra/module.py",
    "lib/python3.12/threading.py",
    "/src/cudakit/plugins/device.py",
    "/home/user/cudakit/train.py",
    "/tmp/ipykernel_7/1234.py",  # noqa: S108 a cell of Jupyter
    "/home/user/solib.py",
    "<stdin>",
    "<string>",
    "<ipython-input-3-abc>",
]
LIBRARY_FILES = [
    "/venv/lib/python3.12/site-packages/torch/nn/modules/rnn.py",
    "site-packages/single.py",
    "/usr/lib/python3/dist-packages/numpy/core.py",
    "/usr/lib/python3.12/threading.py",
    "/usr/lib64/python3.12/threading.py",
    "/opt/python/lib/python3.13t/threading.py",
    "/usr/lib/python312.zip/threading.py",
    "/src/cudakit/gpu/sim/device.py",
    "/src/cudakit/core/sanitize/engine.py",
    "/src/cudakit/run/agent.py",
    "<frozen importlib._bootstrap>",
    "<eval_with_key>.3",
    "<__array_function__ internals>",
    "/pytorch/c10/cuda/CUDACachingAllocator.cpp",
    "kernel.cu",
    "module.c",
    "vector.hpp",
    "/usr/lib/libcuda.so.1",
    "libtorch.so",
    "??",
    "",
]


@pytest.mark.parametrize("filename", PROGRAM_FILES)
def test_files_of_the_program_are_no_library(filename: str) -> None:
    assert not is_library(filename)
    assert library_name(filename) == ""


@pytest.mark.parametrize("filename", LIBRARY_FILES)
def test_call_site_is_the_innermost_frame_outside_of_libraries(filename: str) -> None:
    stack = (Frame("f", filename, 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert is_library(filename)
    assert call_site_index(stack) == 1


def test_the_patterns_of_the_recorder_mean_the_same_in_c() -> None:
    libc = ctypes.CDLL(None)
    patterns = [ctypes.create_string_buffer(1024) for _ in range(2)]  # larger than any regex_t
    for compiled, text in zip(patterns, (LIBRARY_FILE, TYPED_CODE), strict=True):
        assert libc.regcomp(compiled, text.encode(), 1 | 8) == 0  # REG_EXTENDED | REG_NOSUB

    for filename in (*PROGRAM_FILES, *LIBRARY_FILES):
        is_file_of_library, is_typed = (
            libc.regexec(compiled, filename.encode(), 0, None, 0) == 0 for compiled in patterns
        )
        assert (is_file_of_library and not is_typed) == is_library(filename), filename


@pytest.mark.parametrize(
    ("filename", "library"),
    [
        ("/venv/lib/python3.12/site-packages/torch/nn/functional.py", "torch"),
        ("dist-packages/single.py", "single"),
        ("/src/cudakit/gpu/sim/device.py", "cudakit"),
        ("/usr/lib/python3.12/threading.py", ""),
        ("/home/user/train.py", ""),
    ],
)
def test_library_is_the_top_level_package(filename: str, library: str) -> None:
    assert library_name(filename) == library


def test_typed_code_is_the_call_site_and_string_only_without_a_file() -> None:
    script = Frame("<module>", "/venv/bin/ipython", 8)

    assert call_site_index((Frame("f", "<ipython-input-3>", 1), script)) == 0
    assert call_site_index((Frame("f", "<stdin>", 1), script)) == 0
    # Libraries generate code in <string>: __init__ of dataclasses, for example.
    assert call_site_index((Frame("__init__", "<string>", 2), script)) == 1
    assert call_site_index((Frame("f", LIBRARY_FILES[0], 1), Frame("<module>", "<string>", 1))) == 1


def test_call_site_without_a_frame_of_the_program_is_the_innermost_frame() -> None:
    torch = Frame("backward", "/v/site-packages/torch/_tensor.py", 9)
    allocator = Frame("c10::cuda::malloc", "CUDACachingAllocator.cpp", 5)

    assert call_site_index(()) == 0
    assert call_site_index((Frame("f", "<generated>", 3), torch)) == 0
    assert call_site_index((allocator, torch)) == 1
    assert call_site_index((allocator,)) == 0


def test_call_site_of_a_backward_pass_is_its_start() -> None:
    mark = Frame(BACKWARD_FRAME, "", 0)
    torch = Frame("backward", "/v/site-packages/torch/_tensor.py", 9)

    assert is_backward((mark, torch))
    assert not is_backward((torch,))
    assert call_site_index((mark, torch, Frame("step", "/home/u/train.py", 7))) == 2
    assert call_site_index((mark, torch)) == 1
    assert call_site_index((mark,)) == 0
