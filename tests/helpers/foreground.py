"""A run that was begun in the background, as by `nohup`, tests the same as one that was not."""

import signal


def pytest_configure() -> None:
    """Heed the signals that a shell lets its background jobs ignore.

    Programs inherit that they are ignored, so those which the tests start would not hear them either.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
