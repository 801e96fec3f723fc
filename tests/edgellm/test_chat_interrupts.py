"""Interrupts between two lines of a chat's turn: it can answer again, and lost no message."""

from __future__ import annotations

import _thread
import operator
import signal
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from threading import Lock
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from edgellm.chat import Chat
from edgellm.llm import load
from edgellm.text.prompt import Message
from edgellm.text.template import ChatTemplate

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs signals of POSIX")


class AlarmError(BaseException):
    """An exception of a signal handler; like KeyboardInterrupt it is no Exception."""


@pytest.fixture
def chat(tiny_model: Path) -> Iterator[Chat]:
    llm = load(str(tiny_model))
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    llm.engine.template = ChatTemplate(source, bos=None, eos=None)
    with llm.chat(temperature=0, max_tokens=3, ignore_eos=True) as chat:
        chat.send("Hello")
        yield chat


@pytest.fixture
def alarm() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    previous = signal.signal(signal.SIGALRM, handle)
    yield
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("alarm")
def test_a_turn_that_was_just_taken_is_given_back(chat: Chat) -> None:
    """The signal comes while C code takes the lock, so that Python's handler runs right behind."""
    lock = Lock()
    taken = map(lock.acquire, repeat(False))
    struck = map(_thread.interrupt_main, repeat(signal.SIGALRM))
    both = map(operator.itemgetter(0), zip(taken, struck, strict=False))
    chat._turn = SimpleNamespace(acquire=partial(next, both), release=lock.release)  # type: ignore[assignment]
    before = list(chat.messages)
    with pytest.raises(AlarmError):
        chat.send("Are you there?")
    assert not lock.locked()
    assert chat.messages == before


class Struck(list[Message]):
    """Messages; an interrupt comes behind the next change of them."""

    left = 1

    def _strike(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise AlarmError

    def extend(self, messages: Any) -> None:
        super().extend(messages)
        self._strike()

    def append(self, message: Message) -> None:
        super().append(message)
        self._strike()

    def pop(self, *index: Any) -> Message:
        message = super().pop(*index)
        self._strike()
        return message


@pytest.mark.parametrize("again", [False, True])
def test_a_conversation_is_as_it_was(chat: Chat, again: bool) -> None:
    before = list(chat.messages)
    chat.messages = Struck(chat.messages)
    with pytest.raises(AlarmError):
        list(chat.regenerate() if again else chat.stream("And now?"))
    assert chat.messages == before
    assert len(chat.send("And now?").tokens) == 3
