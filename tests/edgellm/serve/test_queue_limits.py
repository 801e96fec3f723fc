"""How much may wait, of all and of each key."""

from __future__ import annotations

import pytest

from edgellm.serve import ServeOptions
from edgellm.serve.metrics import Metrics
from edgellm.serve.queue_limits import QueueLimits
from edgellm.serve.request_error import RequestError


def limits(*, keys: int) -> QueueLimits:
    names = tuple(f"k{i}" for i in range(keys))
    options = ServeOptions(api_keys=names, max_waiting=8, max_waiting_tokens=1000)
    return QueueLimits(options, Metrics())


@pytest.mark.parametrize("keys", [0, 1])
def test_without_several_keys_all_wait_in_one_queue(keys: int) -> None:
    queue = limits(keys=keys)
    asks = [queue.take_in("") for _ in range(8)]
    with pytest.raises(RequestError, match="8 requests wait"):
        queue.take_in("")
    asks[0].take_tokens(3000)  # the only one may have as many as it likes
    with pytest.raises(RequestError, match="3000 tokens"):
        asks[1].take_tokens(1)
    for ask in asks:
        ask.leave()
    assert queue.tokens == queue.metrics.waiting == 0


def test_a_key_has_its_share_of_a_full_queue() -> None:
    """And beyond it what others leave."""
    queue = limits(keys=2)
    many = [queue.take_in("many") for _ in range(8)]
    with pytest.raises(RequestError):
        queue.take_in("many")
    few = [queue.take_in("few") for _ in range(4)]
    with pytest.raises(RequestError):
        queue.take_in("few")
    many[0].take_tokens(900)
    few[0].take_tokens(300)
    few[1].take_tokens(200)
    with pytest.raises(RequestError):
        few[2].take_tokens(1)
    many[0].leave()
    few[2].take_tokens(300)
    assert queue.tokens == 800
