"""Several answers to one prompt, which is computed once; their pieces come as they are ready."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import chain, repeat

from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Pending, Waiting
from edgellm.engine.request import Request
from edgellm.progress import Progress
from edgellm.results import Piece


@dataclass(frozen=True)
class SamplePieces:
    """Pieces of one answer that are there at once.

    Attributes:
        sample: number of the answer, from 0.
        pieces: the pieces, at least one.
    """

    sample: int
    pieces: tuple[Piece, ...]


def sample_pieces(
    engine: Engine,
    tokens: SequenceOf[int],
    call: Call,
    *,
    n: int = 1,
    salt: str = "",
    shown_special: Collection[int] = (),
    begun: Context | None = None,
) -> Pending[Progress | SamplePieces]:
    """Answer a prompt `n` times; reports of its prefill come between the pieces.

    Args:
        call: call of all answers; with a seed, answer i has the seed that is larger by i.
        salt: see `Context`.
        shown_special: see `TextStream`.
        begun: see `forked_requests`.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
        BaseException: the work of one of the answers raised it; the others end with it.
    """
    yield WORKING
    requests = forked_requests(
        engine,
        tokens,
        call,
        n=n,
        wants_reports=True,
        salt=salt,
        shown_special=shown_special,
        begun=begun,
    )
    try:
        engine.loop.submit(requests[0])
        running = dict(enumerate(requests))
        while running:
            yield Waiting(list(running.values()))
            for sample, request in list(running.items()):
                finished = request.finished  # before its last piece is taken
                report, request.report = request.report, None
                if report is not None:
                    yield report
                pieces = tuple(request.next_piece() for _ in range(len(request.pieces)))
                if pieces:
                    yield SamplePieces(sample, pieces)
                if finished:
                    del running[sample]
                    request.raise_error()
    finally:
        for request in requests:
            engine.loop.withdraw(request)


def forked_requests(
    engine: Engine,
    tokens: SequenceOf[int],
    call: Call,
    *,
    n: int,
    wants_reports: bool = False,
    salt: str = "",
    shown_special: Collection[int] = (),
    begun: Context | None = None,
) -> list[Request]:
    """Return requests for `n` answers; the first is to be submitted, and the others fork from it.

    Args:
        begun: context for the first, which keeps what it has of the prompt; None: an empty one.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
    """
    options, first_seed = call.options, call.options.seed
    seeds = [
        secrets.randbits(32) if first_seed is None else (first_seed + i) % 2**64 for i in range(n)
    ]
    dropped = 0
    if len(tokens) > engine.ctx_size:
        # before each answer has as many tokens as a client may send
        dropped = options.when_full.forgotten(
            len(tokens), ctx_size=engine.ctx_size, keep=options.keep
        )
        tokens = [*tokens[: options.keep], *tokens[options.keep + dropped :]]
    unscored = replace(options, prompt_logprobs=None)  # the first answer has them for all
    try:
        contexts = [Context(engine, tokens, salt=salt) for _ in range(n)]
        if begun is not None:
            begun.set(list(tokens))
            contexts[0] = begun
        requests = [
            Request(
                context,
                replace(call, options=replace(each, seed=seed)),
                closes=True,
                wants_reports=wants_reports,
                shown_special=shown_special,
                dropped=dropped,
            )
            for context, each, seed in zip(
                contexts, chain([options], repeat(unscored)), seeds, strict=False
            )
        ]
        first, *others = requests
        first.check()
    except BaseException:
        if begun is not None:
            begun.close()  # else its blocks are held as long as the error is
        raise
    first.forks = others
    return requests
