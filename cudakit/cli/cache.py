"""``cudakit cache``: show, clear or fill the cache of compiled kernels."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import Command, option, output_options
from cudakit.cli.output import (
    COMMON_FORMATS,
    OutputOptions,
    Progress,
    Report,
    open_outputs,
    progress_line,
)
from cudakit.errors import (
    CudakitError,
    EnvironmentUnusable,
    GpuUnavailable,
    MissingDependency,
    UsageError,
)
from cudakit.report.document import Bytes, Column, Document, Facts, Node, Note, Table, Text
from cudakit.units import format_bytes, format_count

if TYPE_CHECKING:
    from cudakit.gpu.compile import CompileCache


_ARCHITECTURE = re.compile(r"(?:sm_)?(\d{1,2})\.?(\d)")
_HINT = "give the architectures: --arch sm_80 --arch sm_90"
_UNUSABLE_PATCH = (
    "the {} needs compute capability {}.{} or newer; without it, run --sanitize infers accesses from kernel"
    " arguments"
)


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def cache(context: click.Context) -> None:
    """Show, clear or fill the cache of compiled kernels.

    The kernels of benchmarks, the race detector, random numbers and expressions (cudakit.elementwise,
    cudakit.reduction) are compiled for the GPU at hand. The results are kept in ~/.cache/cudakit, or in
    CUDAKIT_CACHE_DIR. Files that other users can write to are ignored.

    \b
    cudakit cache show
    cudakit cache clear
    cudakit cache warm --arch sm_80 --arch sm_90
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(ExitCode.USAGE)


@cache.command(cls=Command)
@output_options(COMMON_FORMATS)
def show(*, output: OutputOptions) -> int:
    """List the compiled kernels in the cache.

    \b
    cudakit cache show
    cudakit cache show --json
    """
    compile_cache = _user_cache()
    with open_outputs(output) as outputs:
        outputs.write(_report(compile_cache))
    return ExitCode.OK


@cache.command(cls=Command)
@output_options(COMMON_FORMATS)
def clear(*, output: OutputOptions) -> int:
    """Delete all compiled kernels from the cache.

    \b
    cudakit cache clear
    """
    compile_cache = _user_cache()
    with open_outputs(output) as outputs:
        with _os_errors_reported(compile_cache):
            removed_images = Cleared(*compile_cache.clear())
        outputs.write(_report(compile_cache, cleared=removed_images))
    return ExitCode.OK


@cache.command(cls=Command)
@option(
    "--arch",
    metavar="ARCH",
    multiple=True,
    help="Architecture to compile for, such as sm_90. Repeatable.  [default: those of this machine's GPUs]",
)
@output_options(COMMON_FORMATS)
def warm(*, arch: tuple[str, ...], output: OutputOptions) -> int:
    """Compile all kernels of cudakit now.

    Then the first benchmark, or the first run in a container image, does not wait for the compiler. Kernels
    of expressions are not among them: they are compiled when the expression is first called.

    The command needs NVRTC, and for the race detector ptxas, but no GPU. The exit code is 1 if a kernel
    does not compile, 3 if the cache cannot be written.

    \b
    cudakit cache warm
    cudakit cache warm --arch sm_80 --arch sm_90
    """
    from cudakit.record.device_patch import device_capabilities

    compile_cache = replace(_user_cache(), reports_errors=True)
    capabilities = []
    for text in arch:
        match = _ARCHITECTURE.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not an architecture", hint=_HINT)
        capabilities.append((int(match[1]), int(match[2])))
    capabilities = capabilities or sorted(device_capabilities())
    if not capabilities:
        raise GpuUnavailable("this machine has no GPU to compile for", hint=_HINT)
    with open_outputs(output) as outputs:
        with (
            progress_line(quiet=output.quiet) as progress,
            _os_errors_reported(compile_cache),
        ):
            warmed_targets = tuple(_compile_sources(compile_cache, capabilities, progress))
        outputs.write(_report(compile_cache, warmed=warmed_targets))
    return ExitCode.FINDINGS if any(target.failures for target in warmed_targets) else ExitCode.OK


# --- the cache directory


def _user_cache() -> CompileCache:
    """Return the cache of this user. Raises EnvironmentUnusable if there is no directory for it."""
    from cudakit.gpu.compile import user_cache

    if compile_cache := user_cache(os.environ):
        return compile_cache
    raise EnvironmentUnusable(
        "there is no home directory for the cache", hint="set CUDAKIT_CACHE_DIR to a directory"
    )


@contextmanager
def _os_errors_reported(compile_cache: CompileCache) -> Iterator[None]:
    """Raise EnvironmentUnusable for an error of the file system in the cache."""
    try:
        yield
    except OSError as error:
        hint = (
            "make it a directory that only you can write, or set CUDAKIT_CACHE_DIR to another one"
            if isinstance(error, PermissionError)
            else "set CUDAKIT_CACHE_DIR to another directory"
        )
        raise EnvironmentUnusable(
            f"the cache {compile_cache.directory} cannot be used: {error.strerror or error}",
            hint=hint,
        ) from error


def _report(
    compile_cache: CompileCache,
    *,
    cleared: Cleared | None = None,
    warmed: tuple[Warmed, ...] = (),
) -> Report:
    with _os_errors_reported(compile_cache):
        images, unusable_files = compile_cache.images()
    result = CacheResult(
        directory=str(compile_cache.directory),
        images=tuple(
            Image(
                image.label.kernels,
                image.label.target,
                image.label.compiler,
                image.size_bytes,
                datetime.fromtimestamp(image.written_ns // 10**9, UTC).isoformat(),
            )
            for image in images
        ),
        unusable=unusable_files,
        size_bytes=sum(image.size_bytes for image in images),
        max_images=compile_cache.max_images,
        max_bytes=compile_cache.max_bytes,
        cleared=cleared,
        warmed=warmed,
    )
    return Report(result=result, document=lambda: report(result))


# --- compilation of all kernels


def _compile_sources(
    compile_cache: CompileCache, capabilities: Sequence[tuple[int, int]], progress: Progress
) -> Iterator[Warmed]:
    """Compile all sources for each capability."""
    from cudakit.record.device_patch import OLDEST_CAPABILITY, PATCH_IMAGE_NAME

    for capability_index, capability in enumerate(capabilities):
        compile_functions = _compile_functions(compile_cache)
        unusable_sources: tuple[str, ...] = ()
        if capability < OLDEST_CAPABILITY:
            del compile_functions[PATCH_IMAGE_NAME]
            unusable_sources = (_UNUSABLE_PATCH.format(PATCH_IMAGE_NAME, *OLDEST_CAPABILITY),)
        target = "sm_{}{}".format(*capability)
        failed_sources = defaultdict(list)  # names of sources, by reason of the failure
        for index, (name, compile_source) in enumerate(compile_functions.items()):
            finished_share = (capability_index + index / len(compile_functions)) / len(capabilities)
            progress(f"compiling {name} for {target}", finished_share)
            try:
                compile_source(capability)
            except MissingDependency:
                raise  # nothing can be compiled without NVRTC
            except CudakitError as error:
                failed_sources[error.message.partition("\n")[0]].append(name)
        failures = tuple(
            f"{', '.join(source_names)}: {reason}"
            for reason, source_names in failed_sources.items()
        )
        compiled_count = len(compile_functions) - sum(map(len, failed_sources.values()))
        yield Warmed(target, compiled_count, failures, unusable_sources)


def _compile_functions(
    compile_cache: CompileCache,
) -> dict[str, partial[bytes]]:
    """Return a function for each source that compiles it for a compute capability."""
    from cudakit.arrays import bandwidth, compare, fill, nonfinite, poison, random, spin, timestamp
    from cudakit.arrays.random import STORED_COUNTER_SOURCE
    from cudakit.gpu import selftest
    from cudakit.gpu.compile import compile_cuda
    from cudakit.record.device_patch import PATCH_IMAGE_NAME, build_patch

    modules = (bandwidth, compare, fill, nonfinite, poison, random, spin, timestamp, selftest)
    sources = {module.__name__.rpartition(".")[2]: module.SOURCE for module in modules}
    sources["random in CUDA graphs"] = STORED_COUNTER_SOURCE
    compile_functions: dict[str, partial[bytes]] = {
        name: partial(compile_cuda, source, cache=compile_cache) for name, source in sources.items()
    }
    return compile_functions | {PATCH_IMAGE_NAME: partial(build_patch, cache=compile_cache)}


# --- The cache of compiled kernels: ``cudakit cache`` ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled image in the cache."""

    kernels: (
        str  # names of the kernels, separated by commas; with the name of the source, "name: a, b"
    )
    target: str  # architecture of the image, such as "sm_90"
    compiler: str  # compiler and its version, such as "NVRTC 13.0"
    size_bytes: int  # size of the file
    written: str  # time of the last write in UTC, in the form of ISO 8601


@dataclass(frozen=True, slots=True)
class Cleared:
    """The number and the size of the files that ``cudakit cache clear`` deleted."""

    files: int  # number of deleted files
    size_bytes: int  # size of the deleted files


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of ``cudakit cache warm`` for one architecture."""

    target: str  # architecture, such as "sm_90"
    sources: int  # number of sources whose image is in the cache now
    failures: tuple[str, ...]  # sources that could not be compiled, with the reasons
    # sources that this architecture cannot use, with the consequences
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheResult:
    """The content of the cache, and what ``cudakit cache clear`` or ``cudakit cache warm`` changed."""

    schema: ClassVar[str] = "cudakit.cache/1"
    directory: str  # directory of the images
    images: tuple[Image, ...]  # images, the newest first
    unusable: int  # number of files that are damaged, or that another user can have written
    size_bytes: int  # sum of the sizes of the images
    max_images: int  # number of images above which the oldest images are deleted
    max_bytes: int  # sum of the sizes above which the oldest images are deleted
    cleared: Cleared | None = None  # deleted files; null unless the cache was cleared
    warmed: tuple[Warmed, ...] = ()  # result of ``cache warm`` for each architecture


def report(result: CacheResult) -> Document:
    """Return the report: the result of the action, and the content of the cache after it."""
    if cleared := result.cleared:
        title = f"Deleted {_file_count_text(cleared.files)}, {format_bytes(cleared.size_bytes)}"
    elif result.warmed:
        counts = ", ".join(f"{_file_count_text(t.sources)} for {t.target}" for t in result.warmed)
        title = f"Compiled kernels in the cache: {counts} (one file per source)"
    else:
        count = _file_count_text(len(result.images))
        title = f"{count} with compiled kernels, {format_bytes(result.size_bytes)}"
    return Document(title, tuple(_nodes(result)))


def _nodes(result: CacheResult) -> Iterator[Node]:
    for warmed_target in result.warmed:
        for failure in warmed_target.failures:
            yield Note("error", f"{warmed_target.target}: {failure}")
        for unusable_source in warmed_target.unusable:
            rest_text = "" if warmed_target.failures else "; everything else is compiled"
            yield Note("info", f"{warmed_target.target}: {unusable_source}{rest_text}")
    limit_text = f"{_file_count_text(result.max_images)}, {format_bytes(result.max_bytes)}"
    yield Facts((("directory", Text(result.directory)), ("limit", Text(limit_text))))
    if result.unusable:
        verb = "is" if result.unusable == 1 else "are"
        yield Note(
            "warn",
            f"{_file_count_text(result.unusable)} {verb} damaged or writable by another user, and ignored",
            remedies=("cudakit cache clear",),
        )
    if result.images and not result.warmed:
        texts = (Column("kernels"), Column("target"), Column("compiler"))
        yield Table(
            columns=(*texts, Column("size", "number"), Column("written")),
            rows=tuple(
                (
                    Text(_shortened_kernels(image.kernels)),
                    Text(image.target),
                    Text(image.compiler),
                    Bytes(image.size_bytes),
                    Text(image.written.replace("T", " ")[:16]),
                )
                for image in result.images
            ),
        )


def _shortened_kernels(kernels_text: str) -> str:
    """Return the name of the source, or the name of the first kernel and the number of further kernels."""
    source_name, has_source_name, _ = kernels_text.partition(": ")
    if has_source_name:
        return source_name
    first_kernel, *other_kernels = kernels_text.split(", ")
    return f"{first_kernel} and {len(other_kernels)} more" if other_kernels else first_kernel


def _file_count_text(file_count: int) -> str:
    return f"{format_count(file_count)} file{'' if file_count == 1 else 's'}"
