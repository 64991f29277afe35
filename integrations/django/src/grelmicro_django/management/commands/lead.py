"""`manage.py lead COMMAND`: keep a command running on one host, with standbys on others."""

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser
from django.utils.autoreload import get_child_arguments

from grelmicro import Grelmicro
from grelmicro.config import check_seconds
from grelmicro.coordination import LeaderElection
from grelmicro.errors import GrelmicroError
from grelmicro_django.exits import command_error, usage_error
from grelmicro_django.inner import add_inner_command, checked, own_parser
from grelmicro_django.running import worker_of
from grelmicro_django.serving import serving
from grelmicro_django.singletons import teller
from grelmicro_django.supervising import Supervisor

GRACE_S = 10.0

LOOK_S = 0.05
"""Seconds between two looks for the first answer of the store."""

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Command(BaseCommand):
    """Stands for election, and runs a command in a process of its own while it leads."""

    help = "Keep a command running on one host, with standbys on others: manage.py lead COMMAND [ARGS...]"
    requires_system_checks: list[str] = []  # those of the inner command run
    _from_command_line = False
    _signal = 0
    """The signal by which this process ends."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """See `BaseCommand.create_parser`."""
        return own_parser(super().create_parser(prog_name, subcommand, **kwargs))

    def add_arguments(self, parser: CommandParser) -> None:
        """See `BaseCommand.add_arguments`."""
        add = parser.add_argument
        add("--name", help="the name of the election (default: the command's)")
        add(
            "--grace",
            type=float,
            default=GRACE_S,
            metavar="S",
            help="seconds from SIGTERM to SIGKILL (default: 10)",
        )
        add_inner_command(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """See `BaseCommand.run_from_argv`."""
        self._from_command_line = True
        super().run_from_argv(argv)

    def handle(self, *args: Any, command: str, arguments: list[str], **options: Any) -> None:
        """Stand for election until a signal."""
        if not self._from_command_line:
            raise usage_error("lead starts its command line again, and is not for call_command: start manage.py lead")
        checked("lead", command, arguments)
        try:
            check_seconds("lead: grace", options["grace"], zero=True)
            name = command if options["name"] is None else options["name"]
            asyncio.run(self._stand(name, again(command, arguments, options), options))
        except GrelmicroError as error:
            raise command_error(error) from None
        except asyncio.CancelledError:
            signal.signal(self._signal, signal.SIG_DFL)
            signal.raise_signal(self._signal)

    async def _stand(self, name: str, command_line: list[str], options: dict[str, Any]) -> None:
        self._end_at_signals()
        tell = teller(options, self.stderr)
        async with Grelmicro(uses=[serving.coordination()]) as micro:
            election = LeaderElection(name, worker=worker_of(micro))
            supervisor = Supervisor(election, command_line, options["grace"], tell)
            service = asyncio.create_task(election())
            standby = asyncio.create_task(tell_of_leader(election, tell))
            try:
                await election.lead(supervisor.work, repeat=True)
            finally:
                standby.cancel()
                service.cancel()
                await asyncio.wait([service, standby])

    def _end_at_signals(self) -> None:
        """Let each signal that would end this process end the command first, and the lease after it."""
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            self._signal = self._signal or number
            task.cancel()

        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
                asyncio.get_running_loop().add_signal_handler(number, end, number)


async def tell_of_leader(election: LeaderElection, tell: Callable[[str], object]) -> None:
    """Tell which worker leads, if it is another one that the store names first."""
    while (record := election.record) is None:
        await asyncio.sleep(LOOK_S)
    if not election.is_leader():
        tell(f"standing by for '{election.name}', which worker '{record.worker}' leads")


def again(command: str, arguments: list[str], options: dict[str, Any]) -> list[str]:
    """The command line of the inner command, by the program that runs now."""
    program = get_child_arguments()[: 1 - len(sys.argv)]
    path = options.get("pythonpath")
    return [*program, command, *([f"--pythonpath={path}"] if path else []), *arguments]
