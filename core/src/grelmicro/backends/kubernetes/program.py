"""A program that gives credentials, as a kubeconfig names one: run as `kubectl` runs it, and ended when given up."""

import asyncio
import base64
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Any

from grelmicro.lifecycle import outlast

EARLY = timedelta(minutes=5)
"""How long before its credentials end it runs again."""
LAST_MOMENT = 1.0
"""Seconds for which a killed program is waited for."""


class CredentialsError(Exception):
    """What gives credentials fails; the text can be shown."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a program gave."""

    user: dict[str, str]
    """What a user of a kubeconfig would have in its stead."""
    ends_at: datetime | None
    """None: it does not say."""

    def are_over(self) -> bool:
        """Whether others are needed now."""
        return self.ends_at is not None and datetime.now(UTC) >= self.ends_at - EARLY


@dataclass(frozen=True, slots=True)
class Program:
    """A program that gives credentials."""

    version: str
    """Of what it writes."""
    command: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Program | None":
        """The program of the `exec` of a user; None if it is none."""
        arguments, environment = settings.get("args") or [], settings.get("env") or []
        try:
            pairs = tuple((str(each["name"]), str(each["value"])) for each in environment)
        except (TypeError, KeyError):
            return None
        version, command = settings.get("apiVersion"), settings.get("command")
        if not (isinstance(version, str) and isinstance(command, str) and command and isinstance(arguments, list)):
            return None
        return cls(version, command, tuple(map(str, arguments)), pairs)

    async def run(self) -> Credentials:
        """Its credentials. It runs in a process group of its own, which is killed when this is cancelled.

        What it writes to stderr goes where this process writes its own.

        Raises:
            CredentialsError: it fails, or writes something else.
            OSError: it cannot be run.
        """
        process = await self._start()
        try:
            written, _ = await process.communicate()
        except asyncio.CancelledError:
            await outlast(asyncio.ensure_future(_end(process)))
            raise
        if process.returncode != 0:
            raise self._failed(f"ended with status {process.returncode}; what it wrote to stderr may say why")
        return self._credentials(written)

    async def _start(self) -> Process:
        """Start it. Where this is cancelled meanwhile, asyncio would kill it and leave what it has begun."""
        asked = {"apiVersion": self.version, "kind": "ExecCredential", "spec": {"interactive": False}}
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                self.command,
                *self.arguments,
                stdin=DEVNULL,
                stdout=PIPE,
                env={**os.environ, **dict(self.environment), "KUBERNETES_EXEC_INFO": json.dumps(asked)},
                start_new_session=True,
            )
        )
        try:
            return await outlast(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await outlast(asyncio.ensure_future(_end(starting.result())))
            raise

    def _credentials(self, written: bytes) -> Credentials:
        try:
            answer = json.loads(written)
            status = answer["status"]
            if (answer["kind"], answer["apiVersion"]) != ("ExecCredential", self.version):
                raise self._failed(f"wrote something else than an ExecCredential of {self.version}")
            user = {}
            if status.get("token"):
                user["token"] = str(status["token"])
            if status.get("clientCertificateData"):
                user["client-certificate-data"] = _encoded(status["clientCertificateData"])
                user["client-key-data"] = _encoded(status["clientKeyData"])
            ends = status.get("expirationTimestamp")
            ends_at = datetime.fromisoformat(ends) if ends else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._failed("wrote something that is no ExecCredential") from error
        if not user:
            raise self._failed("gave neither a token nor a certificate")
        return Credentials(user, ends_at if ends_at is None or ends_at.tzinfo else ends_at.replace(tzinfo=UTC))

    def _failed(self, how: str) -> CredentialsError:
        return CredentialsError(f"its program {PurePath(self.command).name} {how}")


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def _end(process: Process) -> None:
    """Kill a program and what it has begun."""
    with suppress(ProcessLookupError, PermissionError):  # of a group that has ended
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), LAST_MOMENT)
