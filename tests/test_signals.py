"""Signals that come while ranks talk: held, and then delivered, whatever their handlers do."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from dcp_rs._signals import held

FIRST, SECOND = signal.SIGUSR1, signal.SIGUSR2


class StopError(Exception):
    pass


@pytest.fixture
def came():
    """Numbers of the signals whose handlers ran; each raises."""
    numbers = []

    def stop(number, _):
        numbers.append(number)
        raise StopError(number)

    before = {number: signal.signal(number, stop) for number in (FIRST, SECOND)}
    yield numbers
    assert all(signal.getsignal(number) is stop for number in before)
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def held_and_stopped():
    """Signals are held; one of them stops it in the end."""
    with pytest.raises(StopError), held() as deliver:
        yield deliver


def send(number):
    os.kill(os.getpid(), number)


def test_they_come_when_it_is_over(came):
    done = []
    with held_and_stopped():
        send(FIRST)
        done.append(1)
    assert (came, done) == ([FIRST], [1])


def test_they_come_when_they_are_asked_for(came):
    with held() as deliver:
        deliver()
        send(FIRST)
        with pytest.raises(StopError):
            deliver()
        deliver()
    assert came == [FIRST]


def test_within_itself_it_waits_for_the_outer_one(came):
    with held_and_stopped():
        with held() as deliver:
            send(FIRST)
            deliver()
        assert came == []
    assert came == [FIRST]


def test_one_handler_that_raises_keeps_no_other_held(came, monkeypatch):
    """The second comes as soon as its handler is back, before the others are."""
    put_back, sent = signal.signal, []

    def signal_and_send(number, handler):
        before = put_back(number, handler)
        if handler.__name__ == "stop" and not sent:
            sent.append(number)
            send(number)
        return before

    with held_and_stopped():
        monkeypatch.setattr(signal, "signal", signal_and_send)
    assert came == sent
    with held_and_stopped():  # it works again
        send(SECOND)
    assert came == [*sent, SECOND]


def test_one_handler_that_raises_loses_no_other_signal(came):
    with held_and_stopped():
        for number in (FIRST, SECOND, FIRST):
            send(number)
    assert came == [FIRST, SECOND]


def test_an_error_within_is_not_lost(came):
    def fail():
        with held():
            send(FIRST)
            raise KeyError("within")

    with pytest.raises(StopError) as raised:
        fail()
    assert isinstance(raised.value.__context__, KeyError)
    assert came == [FIRST]


def test_a_handler_that_was_set_meanwhile_stays(came):
    def other(*_):
        pass

    with held():
        signal.signal(FIRST, other)
    assert signal.getsignal(FIRST) is other
    signal.signal(FIRST, signal.getsignal(SECOND))
    assert came == []


def test_other_threads_hold_none(came):
    ran = []

    def work():
        with held() as deliver:
            deliver()
            ran.append(signal.getsignal(FIRST))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [signal.getsignal(FIRST)]
