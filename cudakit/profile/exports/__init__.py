"""Exports of a profile for other tools, by the suffix of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, TypeAlias

from cudakit.profile.activities import Activities
from cudakit.profile.exports.chrome import write_chrome_trace, write_compressed_chrome_trace
from cudakit.profile.exports.perfetto import write_perfetto_trace
from cudakit.profile.exports.rows import write_csv
from cudakit.profile.exports.stacks import write_collapsed, write_speedscope

Writer: TypeAlias = Callable[[Sequence[Activities], BinaryIO], None]

# Functions that write the activities of all processes to a binary file, by suffix without the first dot.
WRITERS: Mapping[str, Writer] = {
    "trace.json": write_chrome_trace,
    "trace.json.gz": write_compressed_chrome_trace,
    "pftrace": write_perfetto_trace,
    "speedscope.json": write_speedscope,
    "collapsed": write_collapsed,
    "csv": write_csv,
}
