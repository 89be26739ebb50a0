"""Requests to end: held back until a safe place, and while a checkpoint is written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from clew.loop.interrupt import Interrupts


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    monkeypatch.setattr("clew.loop.interrupt.PATIENCE_S", 0.05)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield Interrupts()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_is_written_to_its_end_and_what_comes_after_is_interrupted(
    interrupts: Interrupts, first: bool
) -> None:
    if first:
        ask()
    with interrupts.held():
        if not first:
            ask()
        time.sleep(0.2)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)


def test_a_second_request_does_not_wait_for_the_checkpoint(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        ask()
        ask()
        time.sleep(60)
