"""One concern per folder beyond the core lab; run as `python -m extensions.NAME` from the top level."""

import os
import signal
import sys


def end_before_the_start(number: int, frame: object) -> None:
    """What Ctrl-C does while a command is importing: one line. rl_lab.run_command takes over; rl_lab has the same one."""
    os.write(2, b"interrupted before anything was started\n")
    os._exit(128 + number)


# `python -m extensions.NAME` looks for its module, by way of this one; tests are programs of unittest.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    if any(name.startswith("extensions.") and ".test_" not in name for name in sys.orig_argv):
        signal.signal(signal.SIGINT, end_before_the_start)
