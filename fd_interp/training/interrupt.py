"""Lets a step finish when somebody interrupts, so that what is then saved is of a whole number of steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether one of the signals has arrived."""

    def __init__(self) -> None:
        self.arrived = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal by remembering it."""
        self.arrived = True


@contextmanager
def deferred_interrupts() -> Iterator[Interruption]:
    """Ctrl-C and SIGTERM are noted instead of raised inside; outside the main thread signals never arrive anyway."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.note) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
