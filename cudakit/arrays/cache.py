"""The cache of compiled kernels: ``cudakit cache``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cudakit.report.document import Bytes, Column, Document, Facts, Node, Note, Table, Text
from cudakit.units import format_bytes, format_count


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
    unusable: tuple[
        str, ...
    ] = ()  # sources that this architecture cannot use, with the consequences


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
    return Document(_title(result), tuple(_nodes(result)))


def _title(result: CacheResult) -> str:
    if removed_images := result.cleared:
        return f"Deleted {_file_count_text(removed_images.files)}, {format_bytes(removed_images.size_bytes)}"
    if result.warmed:
        target_counts_text = ", ".join(
            f"{_file_count_text(warmed_target.sources)} for {warmed_target.target}"
            for warmed_target in result.warmed
        )
        return f"Compiled kernels in the cache: {target_counts_text} (one file per source)"
    return f"{_image_count_text(len(result.images))}, {format_bytes(result.size_bytes)}"


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
        yield _table(result)


def _table(result: CacheResult) -> Table:
    return Table(
        columns=(
            Column("kernels", "text"),
            Column("target", "text"),
            Column("compiler", "text"),
            Column("size", "number"),
            Column("written", "text"),
        ),
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


def _image_count_text(image_count: int) -> str:
    return f"{_file_count_text(image_count)} with compiled kernels"


def _file_count_text(file_count: int) -> str:
    return f"{format_count(file_count)} file{'' if file_count == 1 else 's'}"
