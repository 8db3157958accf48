""""""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from contract.kernels import SOURCE
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import CudaError, MissingDependency
from cudakit.gpu.compile import (
    CompileCache,
    Label,
    cache_key,
    choose_target,
    compile_cuda,
    demangle,
    user_cache,
)

SUPPORTED = [75, 80, 86, 90, 100, 120]


def has_nvrtc() -> bool:
    try:
        compile_cuda("", (7, 5))
    except MissingDependency:
        return False
    except CudaError:
        return True
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")


def test_supported_architecture_gets_cubin() -> None:
    assert choose_target((9, 0), SUPPORTED) == ("sm_90", "CUBIN")


def test_architecture_between_supported_gets_ptx_of_previous() -> None:
    assert choose_target((8, 9), SUPPORTED) == ("compute_86", "PTX")


def test_newer_architecture_gets_ptx_of_newest() -> None:
    assert choose_target((13, 1), SUPPORTED) == ("compute_120", "PTX")


def test_older_architecture_error_names_both() -> None:
    with pytest.raises(CudaError, match=r"sm_75 and newer.*sm_70"):
        choose_target((7, 0), SUPPORTED)


@needs_nvrtc
def test_source_compiles_to_cubin() -> None:
    assert compile_cuda(SOURCE, (9, 0)).startswith(b"\x7fELF")


@needs_nvrtc
def test_unknown_architecture_compiles_to_ptx() -> None:
    assert b".visible .entry add" in compile_cuda(SOURCE, (99, 0))


@needs_nvrtc
def test_compile_error_has_log() -> None:
    with pytest.raises(CudaError) as caught:
        compile_cuda("\n\n__global__ void broken() { missing(); }", (9, 0))

    assert caught.value.name == "NVRTC_ERROR_COMPILATION"
    assert "sm_90" in caught.value.message
    assert 'kernels.cu(3): error: identifier "missing" is undefined' in caught.value.message


@pytest.mark.skipif(has_nvrtc(), reason="needs a machine without NVRTC")
def test_missing_nvrtc_hint_is_install_command() -> None:
    with pytest.raises(MissingDependency) as caught:
        compile_cuda(SOURCE, (9, 0))
    assert "not installed" not in caught.value.message
    assert caught.value.hint.startswith("pip install 'nvidia-cuda-nvrtc")
    assert "(cuda.bindings searches the site-packages of this Python)" in caught.value.hint
    assert caught.value.hint.endswith("or set LD_LIBRARY_PATH to the directory of libnvrtc")


LABEL = Label("add", "sm_90", "NVRTC 13.0")


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "new" / "kernels")


def test_stored_image_is_returned(cache: CompileCache) -> None:
    cache.keep("a", b"\x7fELF machine code", LABEL)

    assert cache.get("a") == b"\x7fELF machine code"
    assert cache.get("b") is None


def test_damaged_file_is_ignored(cache: CompileCache) -> None:
    cache.keep("a", b"machine code", LABEL)
    (path,) = cache.directory.iterdir()

    for content in (b"", path.read_bytes()[:-1], path.read_bytes() + b"x", b"\0" * 40):
        path.write_bytes(content)
        assert cache.get("a") is None


def test_impossible_directory_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CompileCache(tmp_path / "file" / "kernels")

    cache.keep("a", b"machine code", LABEL)

    assert cache.get("a") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_ignored(cache: CompileCache) -> None:
    cache.directory.mkdir(parents=True)
    cache.directory.chmod(0o500)

    cache.keep("a", b"machine code", LABEL)

    assert cache.get("a") is None


# A program that stores an image although files may have no bytes, as on a full disk.
_STORE_ON_FULL_DISK = """
import resource, sys
from pathlib import Path
from cudakit.gpu.compile import CompileCache, Label
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
cache = CompileCache(Path(sys.argv[1]), reports_errors=sys.argv[2] == "report")
cache.keep("a", b"machine code", Label("add", "sm_90", "NVRTC 13.0"))
"""


def test_full_disk_leaves_no_image_and_is_reported_if_requested(cache: CompileCache) -> None:
    arguments = [sys.executable, "-c", _STORE_ON_FULL_DISK, str(cache.directory)]

    ignored = subprocess.run([*arguments, "ignore"], capture_output=True, text=True, check=False)
    reported = subprocess.run([*arguments, "report"], capture_output=True, text=True, check=False)

    assert (ignored.returncode, ignored.stderr) == (0, "")
    assert reported.returncode == 1
    assert "OSError" in reported.stderr
    assert [*cache.directory.iterdir()] == []


def _stored(cache: CompileCache) -> Path:
    """Store an image under the key "a", and return its file."""
    cache.keep("a", b"machine code", LABEL)
    assert cache.get("a") == b"machine code"
    return cache.directory / "a.image"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_image_writable_by_others_is_ignored(cache: CompileCache, mode: int) -> None:
    _stored(cache).chmod(mode)

    assert cache.get("a") is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_directory_writable_by_others_is_ignored(cache: CompileCache, mode: int) -> None:
    image = _stored(cache)
    cache.directory.chmod(mode)
    cache.keep("b", b"machine code", LABEL)

    assert cache.get("a") is None
    assert [*cache.directory.iterdir()] == [image]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("is_file", [True, False])
def test_image_of_another_user_is_ignored(cache: CompileCache, is_file: bool) -> None:
    image = _stored(cache)
    os.chown(image if is_file else cache.directory, 12345, -1)

    assert cache.get("a") is None


def test_symbolic_link_to_an_image_is_ignored(cache: CompileCache, tmp_path: Path) -> None:
    image = _stored(cache)
    image.rename(tmp_path / "image")
    image.symlink_to(tmp_path / "image")

    assert cache.get("a") is None


def test_symbolic_link_to_a_directory_is_ignored(cache: CompileCache, tmp_path: Path) -> None:
    _stored(cache)
    cache.directory.rename(tmp_path / "kernels")
    cache.directory.symlink_to(tmp_path / "kernels")
    cache.keep("b", b"machine code", LABEL)

    assert cache.get("a") is None
    assert not (tmp_path / "kernels" / "b.image").exists()


def test_pipe_in_place_of_an_image_is_ignored(cache: CompileCache) -> None:
    image = _stored(cache)
    image.unlink()
    os.mkfifo(image)

    assert cache.get("a") is None


def test_new_directories_are_private_whatever_the_umask(cache: CompileCache) -> None:
    umask = os.umask(0)
    try:
        image = _stored(cache)
    finally:
        os.umask(umask)

    assert [path.stat().st_mode & 0o077 for path in (image, *image.parents[:2])] == [0, 0, 0]


def test_nothing_but_images_is_left_behind(cache: CompileCache) -> None:
    cache.keep("a", b"one", LABEL)
    cache.keep("a", b"two", LABEL)

    assert [path.name for path in cache.directory.iterdir()] == ["a.image"]
    assert cache.get("a") == b"two"


def test_oldest_images_are_deleted(cache: CompileCache) -> None:
    cache.directory.mkdir(parents=True)
    for number in range(520):
        path = cache.directory / f"{number}.image"
        path.write_bytes(b"old")
        os.utime(path, ns=(number, number))

    cache.keep("new", b"image", LABEL)

    remaining_names = {path.stem for path in cache.directory.iterdir()}
    assert remaining_names == {"new", *map(str, range(9, 520))}


@given(st.lists(st.text(), min_size=4, max_size=4), st.lists(st.text(), min_size=4, max_size=4))
def test_different_sources_have_different_keys(
    first_parts: list[str], second_parts: list[str]
) -> None:
    keys = [
        cache_key(parts[0], parts[1], [parts[2]], parts[3]) for parts in (first_parts, second_parts)
    ]

    assert (keys[0] == keys[1]) == (first_parts == second_parts)


def test_cache_directory_follows_xdg(tmp_path: Path) -> None:
    cache = user_cache({"XDG_CACHE_HOME": str(tmp_path)})
    default_cache = user_cache({"XDG_CACHE_HOME": "relative"})

    assert cache == CompileCache(tmp_path / "cudakit" / "kernels")
    assert default_cache == CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")


@needs_nvrtc
def test_compiled_source_is_not_compiled_again(cache: CompileCache) -> None:
    image = compile_cuda(SOURCE, (9, 0), cache=cache)
    (path,) = cache.directory.iterdir()
    cache.keep(path.stem, b"what the cache has", LABEL)

    assert image.startswith(b"\x7fELF")
    assert compile_cuda(SOURCE, (9, 0), cache=cache) == b"what the cache has"
    assert compile_cuda(SOURCE, (8, 0), cache=cache).startswith(b"\x7fELF")


def test_cache_directory_can_be_chosen(tmp_path: Path) -> None:
    variables = {"CUDAKIT_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/elsewhere"}

    assert user_cache(variables) == CompileCache(tmp_path / "kernels")


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), limit=st.integers(1, 2000))
def test_size_of_the_cache_is_limited_but_the_newest_image_stays(
    sizes: list[int], limit: int
) -> None:
    with TemporaryDirectory() as directory:
        cache = CompileCache(Path(directory) / "kernels", max_images=8, max_bytes=limit)
        for number, size in enumerate(sizes):
            cache.keep(str(number), b"x" * size, LABEL)
            os.utime(cache.directory / f"{number}.image", ns=(number, number))
        cache.keep("last", b"x", LABEL)
        images, unusable = cache.images()

        assert unusable == 0
        assert len(images) <= 8
        assert len(images) == 1 or sum(image.size_bytes for image in images) <= limit
        assert cache.get("last") == b"x"


def test_images_are_listed_with_their_labels(cache: CompileCache) -> None:
    cache.keep("a", b"image", LABEL)
    (cache.directory / "damaged.image").write_bytes(b"\0" * 40)

    (image,), unusable = cache.images()

    assert (image.label, unusable) == (LABEL, 1)
    assert image.size_bytes == (cache.directory / "a.image").stat().st_size


def test_cleared_cache_is_empty_and_other_files_stay(cache: CompileCache) -> None:
    cache.keep("a", b"image", LABEL)
    (cache.directory / "tmp123-abc").write_bytes(b"half of an image")
    (cache.directory / "notes.txt").write_text("not an image")

    count, size_bytes = cache.clear()

    assert count == 2
    assert size_bytes > 16
    assert [path.name for path in cache.directory.iterdir()] == ["notes.txt"]


def test_cache_that_was_never_written_is_empty(cache: CompileCache) -> None:
    assert cache.images() == ([], 0)
    assert cache.clear() == (0, 0)


# --- Tests demangling by the C++ runtime -----------------------------------------------------------


def _has_runtime() -> bool:
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return False
    return True


needs_runtime = pytest.mark.skipif(not _has_runtime(), reason="there is no libstdc++")


@needs_runtime
@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        ("_Z3addPfS_i", "add(float*, float*, int)"),
        ("_ZN2at6native4fillIfEEvPT_", "void at::native::fill<float>(float*)"),
        (
            "_Z4fillIZ4makevEUlfE_EvT_",
            "void fill<make()::{lambda(float)#1}>(make()::{lambda(float)#1})",
        ),
    ],
)
def test_mangled_name_is_demangled(mangled: str, readable: str) -> None:
    assert demangle(mangled) == readable


@pytest.mark.parametrize("name", ["", "add", "triton_poi_fused_add_0", "_Z", "_Zno", "_ZN3no"])
def test_unmangled_name_is_unchanged(name: str) -> None:
    assert demangle(name) == name


def test_overlong_name_is_unchanged() -> None:
    name = f"_Z70000{'a' * 70_000}v"

    assert demangle(name) == name


@given(st.text().map("_Z{}".format))
def test_any_text_can_be_demangled_without_error(name: str) -> None:
    assert isinstance(demangle(name), str)
