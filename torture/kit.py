"""What all that goes on in one worker shares."""

import asyncio
from dataclasses import dataclass
from random import Random

from grelmicro.coordination import Coordination
from torture.log import Log
from torture.resource import Resource


@dataclass(frozen=True, slots=True)
class Kit:
    """The means of one worker."""

    log: Log
    coordination: Coordination
    resource: Resource
    """What is written to under the locks."""
    chance: Random
    """What decides."""
    group: asyncio.TaskGroup
    """An error in one of its tasks ends the worker."""
    stop: asyncio.Event
    """Set when the worker shall end."""
