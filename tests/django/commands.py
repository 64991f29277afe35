"""Management commands of the projects of tests."""

WORK = """
import os, time
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("seconds", type=float)
        parser.add_argument("--code", type=int, default=0)
        parser.add_argument("--die", type=int, default=0)
        parser.add_argument("--stubborn", action="store_true")

    def handle(self, *args, seconds, code, die, stubborn, **options):
        log("begin")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                time.sleep(0.05)
                log("at work")
            except BaseException:
                if not stubborn:
                    raise
        if die:
            os.kill(os.getpid(), die)
        if code:
            raise CommandError("refused", returncode=code)
        log("end")


def log(text):
    with open("log", "a") as file:
        file.write(f"{os.getpid()} {text}\\n")
"""

NIGHTLY = """
from grelmicro_django import SingletonCommand


class Command(SingletonCommand):
    singleton_name = "nightly-report"

    def add_arguments(self, parser):
        parser.add_argument("--full", action="store_true")

    def handle(self, *args, full, **options):
        self.lease.raise_if_lost()
        self.stdout.write(f"{self.lease.name} {self.lease.fencing_token > 0} {full}")
"""

HOLD = """
import sys, time
from django.core.management.base import BaseCommand
from grelmicro_django import lock


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("name")

    def handle(self, *args, name, **options):
        with lock(name):
            open("log", "a").write("held\\n")
            time.sleep(60)
"""

FENCED = """
import os, time
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from grelmicro_django import SingletonCommand


class Command(SingletonCommand):
    lease_duration = 2.0
    grace = 3.0

    def add_arguments(self, parser):
        parser.add_argument("seconds", type=float)

    def handle(self, *args, seconds, **options):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                time.sleep(0.05)
                self.write()
            except BaseException as error:
                log(f"goes on after {type(error).__name__}")

    def write(self):
        with connection.cursor() as cursor:
            cursor.execute("UPDATE fenced SET fence = %s WHERE fence <= %s", [self.lease.fencing_token] * 2)
            log("written" if cursor.rowcount else "refused")


def log(text):
    with open("log", "a") as file:
        file.write(f"{os.getpid()} {text}\\n")
"""
"""Writes under its fencing token, and goes on when it is interrupted."""

ROUNDS = """
import os, time
from django.core.management.base import BaseCommand
from grelmicro_django import singleton


class Command(BaseCommand):
    def handle(self, *args, **options):
        open(f"ready-{os.getpid()}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        for _ in range(5):
            add()


@singleton("add", wait=60)
def add():
    count = int(open("count").read())
    time.sleep(0.005)
    with open("count", "w") as file:
        file.write(str(count + 1))
"""
"""Counts in a file, where an overlap would lose a count."""

UNTIL = """
import os, time
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    def handle(self, *args, **options):
        with open("log", "a") as file:
            file.write(f"{os.getpid()} begin\\n")
        while not os.path.exists("stop"):
            time.sleep(0.02)
"""
"""Runs until there is a file."""

BEAT = """
import os, signal, subprocess, sys, time
from django.core.management.base import BaseCommand

SPAWNED = "import time\\nwhile True: open('spawned', 'a').write('.'); time.sleep(0.02)"


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--code", type=int)
        parser.add_argument("--stubborn", action="store_true")
        parser.add_argument("--spawn", action="store_true")

    def handle(self, *args, code, stubborn, spawn, **options):
        log("begin")
        signal.signal(signal.SIGTERM, lambda *_: log("stays") if stubborn else end())
        if spawn:
            subprocess.Popen([sys.executable, "-c", SPAWNED])
        if code is not None:
            sys.exit(code)
        while True:
            log("beat")
            time.sleep(0.02)


def end():
    time.sleep(0.2)
    log("end")
    os._exit(0)


def log(text):
    with open("log", "a") as file:
        file.write(f"{os.getpid()} {text}\\n")
"""
"""Works until it is asked to end, which takes it a moment."""
