"""The provider of the memory store."""

from grelmicro.backends.memory import MemoryProvider

__all__ = ["MemoryProvider"]
