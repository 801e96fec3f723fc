"""The engine over a KV cache of its own, and a back end that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from inspection import set_costs, used_blocks

from edgellm.backends.batch import Rows, Span, reserved
from edgellm.backends.providers import Placement
from edgellm.cache.groups import DRAFT_STATES, Group, StateGroup, cache_groups, rope_frequencies
from edgellm.cache.kv_cache import KVCache
from edgellm.engine.adapters import Adapters
from edgellm.engine.call import Call
from edgellm.engine.loop import Loop
from edgellm.engine.prompt_lookup import TokenTable
from edgellm.engine.request import Request
from edgellm.engine.samples import forked_requests
from edgellm.engine.thread import EngineThread
from edgellm.generation_options import GenerationOptions
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp
from edgellm.kernels.sampling import Logits
from edgellm.options import EngineOptions

VOCABULARY = 64
GREEDY = GenerationOptions(temperature=0, repetition_limit=0)


class Tokenizer:
    eos_ids: frozenset[int] = frozenset()

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Backend:
    """The token after a token is the next larger one."""

    name, precision = "native", "packed"
    exact_rows, row_multiple, chunk_rows = True, 1, 1
    placement = Placement("native", {})

    def rows_at_once(self, sequence: object) -> int:
        return 512

    def run(
        self, spans: Sequence[Span], *, should_stop: Callable[[], bool] | None = None
    ) -> list[Rows]:
        with reserved(spans):
            results = [self._rows(span) for span in spans]
            for span in spans:
                span.sequence.commit(span.tokens)
        return results

    def _rows(self, span: Span) -> Rows:
        count = len(span.tokens)
        logits = []
        for token in span.tokens[count - span.logit_rows :]:
            scores = np.zeros(VOCABULARY, np.float32)
            scores[(token + 1) % VOCABULARY] = 9
            logits.append(Logits(scores, float(np.log(np.exp(scores).sum()))))
        return Rows(np.zeros((count, 4), np.float32), logits, {"native": count}, ())


class StateBackend(Backend):
    """The token after some tokens is the second layer's state, a function of all of them."""

    def _rows(self, span: Span) -> Rows:
        start, tokens = len(span.sequence), span.tokens
        view = span.sequence.states(start, start + len(tokens))[1]
        assert view is not None
        state = 0.0 if view.source is None else float(view.blocks.states[view.source, 0, 0])
        states = [state := folded([token], state) for token in tokens]
        for count, block in view.targets:
            view.blocks.states[block, 0] = states[count - 1]
        return super()._rows(replace(span, tokens=[int(state) - 1 for state in states]))


def folded(tokens: Sequence[int], state: float = 0.0) -> float:
    """The state after tokens; whole numbers that float32 holds."""
    for token in tokens:
        state = (state * 31 + token + 1) % 65521
    return state


class StillLoop(Loop):
    """Steps only where a test asks for one."""

    has_work = False  # type: ignore[assignment]


def start(
    ctx_size: int,
    *,
    blocks: int,
    exact: bool = True,
    apart: bool = False,
    states: bool = False,
    drafts: bool = False,
    **options: Any,
) -> Any:
    """A model to the eyes of requests, and of `inspection.py`.

    Args:
        exact: what was preempted is computed again, and not kept outside the cache.
        apart: prompts and decodes are two calls of two back ends.
        states: a second layer has a state, from which the tokens come.
        drafts: there is room for states after rows of drafts.
        options: of the engine.
    """
    attention = Attention(heads=1, kv_heads=1, head_dim=8)
    config: Any = SimpleNamespace(
        layers=[LayerConfig(mixer=attention, mlp=Mlp(intermediate=32))],
        has_states=False,
        layer_count=1,
        head_dim=8,
        kv_heads=1,
        attention=attention,
        vocab_size=VOCABULARY,
        context_length=ctx_size,
        rope_of=lambda _: SimpleNamespace(inv_freq=(1.0,) * 4),
    )
    thread = EngineThread()
    groups: list[Group] = [*cache_groups(config)]
    if states:
        groups.append(StateGroup((1,), elements=2))
    cache = KVCache(
        groups,
        format="int8",
        ctx_size=ctx_size,
        blocks=blocks,
        drafts=DRAFT_STATES if drafts else 0,
        fingerprint=b"",
        rope_frequencies=rope_frequencies(config),
        defer=thread.soon,
    )
    for array in cache.groups[0].blocks.arrays:
        array[...] = 0  # nothing writes there, but a context that shifts reads it
    for group in cache.groups[1:]:
        for array in group.blocks.arrays:
            array[...] = np.nan
    backend = StateBackend if states else Backend
    prefill: Any = backend()
    decoder: Any = backend() if apart else prefill
    chosen = EngineOptions(**options)
    loop = StillLoop(thread, cache, chosen, prefill=prefill, decoder=decoder)
    bundle: Any = None  # no adapter is loaded
    engine: Any = SimpleNamespace(
        shortlists=tuple,
        adapters=Adapters(bundle, prefill=prefill, decoder=decoder),
        cache=cache,
        thread=thread,
        config=config,
        ctx_size=ctx_size,
        tokenizer=Tokenizer(),
        prefill=prefill,
        decoder=decoder,
        draft_model=None,
        expert_memory=None,
        token_table=TokenTable(),
        state_steps=0.1 if states else 0.0,
        recomputes_exactly=exact and not apart,
        scheduling=chosen.scheduling,
        options=chosen,
        loop=loop,
    )
    llm: Any = SimpleNamespace(engine=engine)
    set_costs(llm, 1e-3)  # a step has room for 100 rows
    return llm


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def ask(
    llm: Any,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = None,
    n: int = 1,
    owner: str = "",
    options: GenerationOptions = GREEDY,
) -> list[Request]:
    """Submit a prompt; the answers to it."""
    options = replace(options, max_tokens=max_tokens or options.max_tokens, owner=owner)
    requests = forked_requests(llm.engine, prompt, Call(options=options), n=n)
    llm.engine.loop.submit(requests[0])
    return requests


def step(llm: Any, requests: Sequence[Request]) -> None:
    """A step, and all readers take what it brought."""
    llm.engine.thread.call(llm.engine.loop.step)
    for request in requests:
        while request.pieces:
            request.next_piece()


def sampled(request: Request) -> int:
    """Tokens of its answer."""
    return request.stats().generation_tokens


def finish(llm: Any, requests: Sequence[Request], *, each: Callable[[], object] = bool) -> None:
    """Step until all have finished, without an error; `each` is called behind each step."""
    steps = 0
    while not all(request.finished for request in requests):
        step(llm, requests)
        each()
        steps += 1
        assert steps < 20_000
    assert [request.error for request in requests] == [None] * len(requests)
    assert used_blocks(llm) == 0
