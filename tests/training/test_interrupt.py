import signal
import threading
from pathlib import Path

import pytest

from fd_interp.training.interrupt import SIGNALS, deferred_interrupts


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_nothing_is_raised_inside(number: signal.Signals) -> None:
    before = handlers()
    with deferred_interrupts() as interruption:
        assert not interruption.arrived
        signal.raise_signal(number)
        assert interruption.arrived
        signal.raise_signal(number)
    assert handlers() == before


def test_handlers_come_back_after_an_error_too() -> None:
    before = handlers()
    with pytest.raises(ZeroDivisionError), deferred_interrupts():
        _ = 1 / 0
    assert handlers() == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_interrupts() as interruption:
            seen.extend([interruption.arrived, *handlers()])

    before = handlers()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, *before]


def test_training_in_a_thread_works(small_run, tmp_path: Path) -> None:
    from fd_interp.training.loop import train

    found: list[object] = []
    thread = threading.Thread(
        target=lambda: found.append(train(small_run, tmp_path / "run", show_progress=False).steps)
    )
    thread.start()
    thread.join()
    assert found == [[0, 10, 20, 30]]
