import os
import signal
import threading

import pytest

from quire.engine.interrupts import interrupts_between_steps


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_first_interrupt_waits_for_the_check() -> None:
    with interrupts_between_steps() as check:
        check()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait() -> None:
    with interrupts_between_steps():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_own_handler_is_left_alone() -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with interrupts_between_steps() as check:
            interrupt()
            check()
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_may_use_it_too() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with interrupts_between_steps() as check:
                check()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
