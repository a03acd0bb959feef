"""One folder per concern beyond the core lab; run as `python -m extensions.NAME` from the top level."""

import os
import signal
import sys


def end_before_the_start(number: int, frame: object) -> None:
    """What Ctrl-C and SIGTERM do while a command is importing. rl_lab has the same one; its run_command takes over."""
    os.write(2, b"interrupted before anything was started\n")
    os._exit(128 + number)


# `python -m extensions.NAME` looks for its module, by way of this one; a test is a program of unittest.
if sys.argv[:1] == ["-m"] and any(name.startswith("extensions.") and ".test_" not in name for name in sys.orig_argv):
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(_number, end_before_the_start)
