"""`manage.py singleton -- COMMAND`: run any command in one process at a time."""

from typing import Any

from django.core.management import BaseCommand, call_command
from django.core.management.base import CommandParser

from grelmicro.coordination import ThreadLockHandle
from grelmicro.errors import GrelmicroError
from grelmicro_django.exits import command_error
from grelmicro_django.inner import add_inner_command, checked, own_parser
from grelmicro_django.policies import ON_BUSY, ON_LOST, Policy
from grelmicro_django.running import Skipped, run
from grelmicro_django.singletons import SingletonMixin, teller

FLAGS = ("name", "on_busy", "wait", "lease_duration", "max_hold", "min_hold", "on_lost", "grace")


class Command(BaseCommand):
    """Runs another command under a lease, which its process renews."""

    help = "Run a command in one process at a time: manage.py singleton -- COMMAND [ARGS...]"
    requires_system_checks: list[str] = []  # those of the inner command run
    _from_command_line: list[str] | None = None

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """See `BaseCommand.create_parser`."""
        return own_parser(super().create_parser(prog_name, subcommand, **kwargs))

    def add_arguments(self, parser: CommandParser) -> None:
        """See `BaseCommand.add_arguments`."""
        add = parser.add_argument
        add("--name", help="the name of the lock (default: the command's)")
        add("--on-busy", choices=ON_BUSY, help="what to do while another process runs it (default: skip)")
        add("--wait", type=float, metavar="S", help="seconds to wait at most (default: no limit)")
        add("--lease", dest="lease_duration", type=float, metavar="S", help="seconds of the lease (default: 60)")
        add("--max-hold", type=float, metavar="S", help="seconds after which it is stopped (default: no limit)")
        add("--min-hold", type=float, metavar="S", help="seconds for which no other process runs it (default: 0)")
        add("--on-lost", choices=ON_LOST, help="what to do when the lease is lost (default: stop)")
        add("--grace", type=float, metavar="S", help="seconds after which a stuck process is ended (default: 5)")
        add_inner_command(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """See `BaseCommand.run_from_argv`."""
        self._from_command_line = argv
        super().run_from_argv(argv)

    def handle(self, *args: Any, command: str, arguments: list[str], **options: Any) -> str | None:
        """Run the command."""
        inner = checked("singleton", command, arguments)
        flags = {name: options[name] for name in FLAGS if options.get(name) is not None}
        if isinstance(inner, SingletonMixin):  # which acquires the lease
            inner.override(**flags)
            return self._run(command, inner, arguments, options)
        try:
            policy = Policy(name=flags.pop("name", command)).overridden(**flags)
        except GrelmicroError as error:
            raise command_error(error) from None

        def work(_: ThreadLockHandle) -> str | None:
            return self._run(command, inner, arguments, options)

        result = run(policy, work, failure=command_error, tell=teller(options, self.stderr))
        return None if isinstance(result, Skipped) else result

    def _run(self, command: str, inner: BaseCommand, arguments: list[str], options: dict[str, Any]) -> str | None:
        if self._from_command_line is None:
            result: str | None = call_command(
                inner, *arguments, stdout=options.get("stdout"), stderr=options.get("stderr")
            )
            return result
        inner.run_from_argv([self._from_command_line[0], command, *arguments])
        return None
