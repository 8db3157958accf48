"""The two calls that Buffers of cuda.core make, in C."""

from cudakit.gpu.plugs.buffers import Calls as Calls
