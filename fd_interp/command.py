"""How a command ends: its exit status, and one sentence on what is wrong."""

import sys
from collections.abc import Callable

from fd_interp.config import InputError

BAD_INPUT, INTERRUPTED = 2, 130


def exit_status(name: str, action: Callable[[], int]) -> int:
    """What the action returns; 2 and a sentence on stderr for bad input; 130 when interrupted."""
    try:
        return action()
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has seen enough, and the interpreter need not complain at exit
        return 0
