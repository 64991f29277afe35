"""`manage.py singleton -- COMMAND`: run any command in one process at a time."""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from django.core.management import BaseCommand, call_command, get_commands, load_command_class
from django.core.management.base import CommandParser

from grelmicro.coordination import ThreadLockHandle
from grelmicro.errors import GrelmicroError
from grelmicro_django.exits import USAGE, command_error, usage_error
from grelmicro_django.policies import ON_BUSY, ON_LOST, Policy
from grelmicro_django.running import Skipped, run
from grelmicro_django.singletons import SingletonMixin, teller

FLAGS = ("name", "on_busy", "wait", "lease_duration", "max_hold", "min_hold", "on_lost", "grace")

RUNSERVER = "django.core.management.commands.runserver"


class Parser(CommandParser):
    """Leaves all that follows `--`, or the name of the inner command, to that command; a mistake is one line."""

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """See `ArgumentParser.parse_args`."""
        given = list(sys.argv[1:] if args is None else args)
        own, inner = given, []
        if "--" in given:
            at = given.index("--")
            own, inner = given[:at], given[at:]
        parsed = super().parse_args(own, namespace)
        if parsed.command is None:
            parsed.command, parsed.arguments = (inner[1], inner[2:]) if len(inner) > 1 else (None, [])
        else:
            parsed.arguments = [*parsed.arguments, *inner]
        if not parsed.command:
            self.error("the command is missing: manage.py singleton -- COMMAND")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End with one line."""
        if self.called_from_command_line:
            self.exit(USAGE, f"{self.prog}: {message}\n")
        raise usage_error(message)


class Command(BaseCommand):
    """Runs another command under a lease, which its process renews."""

    help = "Run a command in one process at a time: manage.py singleton -- COMMAND [ARGS...]"
    requires_system_checks: list[str] = []  # those of the inner command run
    _from_command_line: list[str] | None = None

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """See `BaseCommand.create_parser`."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        return Parser(
            prog=parser.prog,
            description=parser.description,
            formatter_class=parser.formatter_class,
            called_from_command_line=parser.called_from_command_line,
            parents=[parser],
            add_help=False,
        )

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
        add("command", nargs="?", help="the command to run")
        add("arguments", nargs=REMAINDER, help="its arguments")

    def run_from_argv(self, argv: list[str]) -> None:
        """See `BaseCommand.run_from_argv`."""
        self._from_command_line = argv
        super().run_from_argv(argv)

    def handle(self, *args: Any, command: str, arguments: list[str], **options: Any) -> str | None:
        """Run the command."""
        check_loaded(arguments)
        inner = load(command)
        check_restart(command, inner, arguments)
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


def load(name: str) -> BaseCommand:
    """The command of a name; raises `CommandError` where there is none."""
    commands = get_commands()
    if name not in commands:
        near = get_close_matches(name, commands, 1)
        raise usage_error(f"unknown command {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    app = commands[name]
    return app if isinstance(app, BaseCommand) else load_command_class(app, name)


def check_loaded(arguments: list[str]) -> None:
    """Refuse options of the inner command that come too late: Django looks at none behind `--`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings", nargs="?")
    parser.add_argument("--pythonpath", nargs="?")
    given, _ = parser.parse_known_args(arguments)
    if given.settings is not None and given.settings != os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise usage_error(too_late("--settings", given.settings))
    if given.pythonpath is not None and given.pythonpath not in sys.path:
        raise usage_error(too_late("--pythonpath", given.pythonpath))


def too_late(option: str, value: str) -> str:
    """Why an option of the inner command is refused."""
    return f"{option}={value} comes after others were loaded: write manage.py singleton {option}={value} -- COMMAND"


def check_restart(name: str, inner: BaseCommand, arguments: list[str]) -> None:
    """Refuse commands that start their own command line again, which would be a second singleton."""
    runserver: Any = sys.modules.get(RUNSERVER)
    restarts = name == "runserver_plus" or (runserver is not None and isinstance(inner, runserver.Command))
    if restarts and "--noreload" not in arguments:
        raise usage_error(f"{name} restarts its own command line, and would skip itself: add --noreload")
