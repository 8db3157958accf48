"""The two calls that Buffers of cuda.core make, in C."""

from cudakit.arrays.plugs.buffers import Calls as Calls
