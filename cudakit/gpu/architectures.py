"""Names of NVIDIA GPU architectures by compute capability.

From the table of the CUDA C++ Programming Guide, "Compute Capabilities", and developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

_NAME_BY_CAPABILITY = MappingProxyType({(7, 5): "Turing", (8, 9): "Ada Lovelace"})
_NAME_BY_MAJOR = MappingProxyType(
    {
        5: "Maxwell",
        6: "Pascal",
        7: "Volta",
        8: "Ampere",
        9: "Hopper",
        10: "Blackwell",
        11: "Blackwell",
        12: "Blackwell",
    }
)


class Capability(NamedTuple):
    """A compute capability, comparable with tuples: ``capability() >= (8, 0)``."""

    major: int
    minor: int

    @property
    def architecture(self) -> str:
        """The architecture name, such as "Hopper"; "unknown" if it is newer than this table."""
        return _NAME_BY_CAPABILITY.get(self) or _NAME_BY_MAJOR.get(self.major, "unknown")

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"
