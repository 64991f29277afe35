"""The command that another one runs: `manage.py singleton -- COMMAND`, `manage.py lead COMMAND`."""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from django.core.management import BaseCommand, get_commands, load_command_class
from django.core.management.base import CommandParser

from grelmicro_django.exits import USAGE, usage_error

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
            self.error(f"the command is missing: {self.prog} -- COMMAND")
        return parsed

    def error(self, message: str) -> NoReturn:
        """End with one line."""
        if self.called_from_command_line:
            self.exit(USAGE, f"{self.prog}: {message}\n")
        raise usage_error(message)


def own_parser(parser: CommandParser) -> Parser:
    """A `Parser` with the options that Django gives each command."""
    return Parser(
        prog=parser.prog,
        description=parser.description,
        formatter_class=parser.formatter_class,
        called_from_command_line=parser.called_from_command_line,
        parents=[parser],
        add_help=False,
    )


def add_inner_command(parser: CommandParser) -> None:
    """Let the inner command and its arguments follow the options."""
    parser.add_argument("command", nargs="?", help="the command to run")
    parser.add_argument("arguments", nargs=REMAINDER, help="its arguments")


def checked(outer: str, name: str, arguments: list[str]) -> BaseCommand:
    """The inner command of a command line.

    Args:
        outer: the name of the outer command, for the errors' texts.
        name: the name of the inner command.
        arguments: its arguments.

    Raises:
        CommandError: there is none of this name, or it would not run as its command line says.
    """
    check_loaded(outer, arguments)
    inner = load(name)
    check_restart(outer, name, inner, arguments)
    return inner


def load(name: str) -> BaseCommand:
    """The command of a name; raises `CommandError` where there is none."""
    commands = get_commands()
    if name not in commands:
        near = get_close_matches(name, commands, 1)
        raise usage_error(f"unknown command {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    app = commands[name]
    return app if isinstance(app, BaseCommand) else load_command_class(app, name)


def check_loaded(outer: str, arguments: list[str]) -> None:
    """Refuse options of the inner command that come too late: Django looks at none behind `--`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings", nargs="?")
    parser.add_argument("--pythonpath", nargs="?")
    given, _ = parser.parse_known_args(arguments)
    if given.settings is not None and given.settings != os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise usage_error(too_late(outer, "--settings", given.settings))
    if given.pythonpath is not None and given.pythonpath not in sys.path:
        raise usage_error(too_late(outer, "--pythonpath", given.pythonpath))


def too_late(outer: str, option: str, value: str) -> str:
    """Why an option of the inner command is refused."""
    return f"{option}={value} comes after others were loaded: write manage.py {outer} {option}={value} -- COMMAND"


def check_restart(outer: str, name: str, inner: BaseCommand, arguments: list[str]) -> None:
    """Refuse commands that start their own command line again, which the outer command would not know of."""
    runserver: Any = sys.modules.get(RUNSERVER)
    restarts = name == "runserver_plus" or (runserver is not None and isinstance(inner, runserver.Command))
    if restarts and "--noreload" not in arguments:
        raise usage_error(f"{name} restarts its own command line, which {outer} cannot guard: add --noreload")
