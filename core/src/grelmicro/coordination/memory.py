"""Backends in the memory of one process."""

from grelmicro.backends.memory import MemoryLeaderElectionAdapter, MemoryLockAdapter, MemoryScheduleAdapter

__all__ = ["MemoryLeaderElectionAdapter", "MemoryLockAdapter", "MemoryScheduleAdapter"]
