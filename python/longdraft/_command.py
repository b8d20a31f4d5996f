"""The command line."""

import signal
import sys
from typing import List, Optional

from . import _longdraft


def main(words: Optional[List[str]] = None) -> int:
    """Runs the command that the words (by default the process's own) name; returns its exit code.

    It takes the process over: signals end or save the command, as they do outside of Python. A process calls it once.
    """
    # Not where Ctrl-C is ignored, as in the background of a shell.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _longdraft.main(["longdraft", *(sys.argv[1:] if words is None else words)])
