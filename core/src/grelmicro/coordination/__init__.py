"""Locks, task locks and leader election over all workers of a service, on any store."""

from grelmicro.alone import check_alone
from grelmicro.coordination.acquisition import Acquisition
from grelmicro.coordination.component import Coordination
from grelmicro.coordination.handle import LockHandle, ThreadLockHandle
from grelmicro.coordination.health import ElectionHealth, HealthCheck, HealthReport, StoreHealth
from grelmicro.coordination.holders import LeaseHolder
from grelmicro.coordination.leaderelection import LeaderElection, LeaderElectionConfig
from grelmicro.coordination.lock import Lock, LockConfig
from grelmicro.coordination.loophandle import LoopLockHandle
from grelmicro.coordination.multihandle import MultiLockHandle, ThreadMultiLockHandle
from grelmicro.coordination.multilock import MultiLock
from grelmicro.coordination.protocols import LeaderElectionBackend, LockBackend, ScheduleBackend
from grelmicro.coordination.records import LeaderRecord
from grelmicro.coordination.synchronization import synchronized
from grelmicro.coordination.tasklock import TaskLock, TaskLockConfig
from grelmicro.coordination.template import LockTemplate
from grelmicro.errors import (
    BackendUnavailableError,
    CoordinationBackendError,
    CoordinationError,
    LeadershipLostError,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    NotLeaderError,
    OutcomeUnknownError,
    WouldBlockError,
)

__all__ = [
    "Acquisition",
    "BackendUnavailableError",
    "Coordination",
    "CoordinationBackendError",
    "CoordinationError",
    "ElectionHealth",
    "HealthCheck",
    "HealthReport",
    "LeaderElection",
    "LeaderElectionBackend",
    "LeaderElectionConfig",
    "LeaderRecord",
    "LeadershipLostError",
    "LeaseHolder",
    "Lock",
    "LockBackend",
    "LockConfig",
    "LockHandle",
    "LockLostError",
    "LockNotOwnedError",
    "LockReentrantError",
    "LockTemplate",
    "LockTimeoutError",
    "LoopLockHandle",
    "MultiLock",
    "MultiLockHandle",
    "NotLeaderError",
    "OutcomeUnknownError",
    "ScheduleBackend",
    "StoreHealth",
    "TaskLock",
    "TaskLockConfig",
    "ThreadLockHandle",
    "ThreadMultiLockHandle",
    "WouldBlockError",
    "synchronized",
]

check_alone()
