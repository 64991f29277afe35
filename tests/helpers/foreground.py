"""A run that was begun in the background, as by `nohup`, tests the same as one that was not."""

import signal


def pytest_configure() -> None:
    """Heed the signals that a shell and `nohup` let background jobs ignore.

    Programs inherit that they are ignored, so those which the tests start would not hear them either.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)
