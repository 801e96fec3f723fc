"""Infill: the text between a prefix and a suffix."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from edgellm.checks import check_number, check_text
from edgellm.engine.call import Call, CallArguments, model_call
from edgellm.engine.engine import Engine
from edgellm.engine.loop import iterate, run
from edgellm.engine.samplers import keep_min_p, keep_top_p, softmax
from edgellm.engine.turned import RECOMPUTE, compute
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import top_k
from edgellm.results import Completion, Piece, completion
from edgellm.session import Session, check_session
from edgellm.text.fim import ORDERS, Budget, Gap, Order, assemble, require_family
from edgellm.text.prompt import Message, encode_conversation
from edgellm.text.tokenizer import Tokenizer

__all__ = ["ORDERS", "Gap", "Order", "infill_options", "infill_tokens"]

_REQUEST = (
    "Text is missing at the mark <gap/>. Answer with the missing text alone: no explanation, no "
    "quotation marks, nothing of what stands around it.\n\n{prefix}<gap/>{suffix}"
)
# Maximum of candidates: they are decoded and compared in pairs, which takes 12 ms for all.
_MOST_CANDIDATES = 256
# Tokens that go on with the text and are less probable than this are left out.
_LEAST = 0.2


class InfillArguments(CallArguments, total=False):
    """Keyword arguments of an infill: those of `CallArguments`, and these.

    extra: other files, each a path and its text.
    path: path of the file with the gap, `main` if it is not given; used only with other files or a
        repository.
    repository: name of the files' repository.
    order: order of the parts: `psm`, `spm`, or None for the order of the model's training. With
        `spm` the suffix keeps its place in the KV cache while the prefix grows.
    single_line: whether to stop at the end of the line.
    template: whether to ask in words through the chat template, for models without infill tokens.
    session: session with an earlier version of the gap, of which K and V of the suffix are kept as
        well, whatever the order: see `Session.replace`. Then it has this one.
    recompute: share of that suffix that is computed again; 0.05 unless told otherwise.
    """

    extra: Sequence[tuple[str, str]]
    path: str
    repository: str | None
    order: Order | None
    single_line: bool
    template: bool
    session: Session | None
    recompute: float


class Infilling:
    """Methods of `LLM` for gaps in a text."""

    @property
    def engine(self) -> Engine:
        """Engine that runs the model."""
        raise NotImplementedError

    def infill(self, prefix: str, suffix: str, **arguments: Unpack[InfillArguments]) -> Completion:
        """Return the text that belongs between a prefix and a suffix; greedy unless told otherwise.

        Args:
            arguments: see `InfillArguments`; `min_indent` and `time_limit_ms` are for editors.

        Raises:
            UnsupportedModelError: the model has no infill tokens, and `template` is not set.
        """
        return completion(list(self._infilling(prefix, suffix, arguments, whole=True)))

    def stream_infill(
        self, prefix: str, suffix: str, **arguments: Unpack[InfillArguments]
    ) -> Iterator[Piece]:
        """Stream the text of `infill`, piece by piece."""
        return self._infilling(prefix, suffix, arguments, whole=False)

    def _infilling(
        self, prefix: str, suffix: str, arguments: InfillArguments, *, whole: bool
    ) -> Iterator[Piece]:
        gap = Gap(
            prefix=prefix,
            suffix=suffix,
            extra=arguments.pop("extra", ()),
            path=arguments.pop("path", "main"),
            repository=arguments.pop("repository", None),
        )
        for argument in ("prefix", "suffix", "path"):
            check_text(argument, getattr(gap, argument))
        order, template = arguments.pop("order", None), arguments.pop("template", False)
        single_line = arguments.pop("single_line", False)
        session, recompute = arguments.pop("session", None), arguments.pop("recompute", RECOMPUTE)
        if arguments.get("options") is None:
            arguments.setdefault("temperature", 0.0)
        if session is None:
            call = model_call(self.engine, arguments)
        else:
            call = check_session(session, self.engine)._call(arguments)
        call = replace(call, whole=whole)
        if single_line:
            stop = [*call.options.stop, "\n"]
            call = replace(call, options=replace(call.options, stop=stop))
        call, tokens = _asked(self.engine, gap, call, order=order, template=template)
        return _filled(self.engine, tokens, call, session=session, recompute=recompute)


def infill_tokens(
    tokenizer: Tokenizer,
    gap: Gap,
    *,
    model: str,
    order: Order | None = None,
    budget: Budget | None = None,
) -> list[int]:
    """Return the prompt for a gap, in the infill tokens of the model's family (see `fim.py`).

    Args:
        model: name of the model, for the error.
        order: order of the parts; None: the family's own.
        budget: number of tokens for each part; None: all of them.

    Raises:
        UnsupportedModelError: the model has no infill tokens.
        OptionError: an unknown order.
    """
    if order not in (None, *ORDERS):
        raise OptionError(f"`order` is {order!r}; allowed are {', '.join(ORDERS)}")
    family = require_family(tokenizer.vocabulary, tokenizer.fim, model=model)
    return assemble(
        family,
        gap,
        encode=lambda text: tokenizer.encode(text, add_bos=False),
        vocabulary=tokenizer.vocabulary,
        bos=tokenizer.bos_id if tokenizer.adds_bos else None,
        order=order,
        budget=budget,
    )


def infill_options(engine: Engine, options: GenerationOptions) -> GenerationOptions:
    """Return the options with the stop texts and tokens that end an infill of the family."""
    tokenizer = engine.tokenizer
    family = require_family(tokenizer.vocabulary, tokenizer.fim, model=engine.bundle.manifest.name)
    known = (tokenizer.vocabulary.get(text) for text in family.stop_tokens)
    return replace(
        options,
        stop=[*options.stop, *family.stop_texts],
        stop_tokens=[*options.stop_tokens, *(token for token in known if token is not None)],
    )


def _asked(
    engine: Engine, gap: Gap, call: Call, *, order: Order | None, template: bool
) -> tuple[Call, list[int]]:
    """Return the call and the prompt for a gap."""
    if template:
        return call, _in_words(engine, gap)
    model = engine.bundle.manifest.name
    try:
        tokens = infill_tokens(engine.tokenizer, gap, model=model, order=order)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}, or ask it in words with `template`") from error
    return replace(call, options=infill_options(engine, call.options)), tokens


def _filled(
    engine: Engine, tokens: list[int], call: Call, *, session: Session | None, recompute: float
) -> Iterator[Piece]:
    """Stream the text for a gap; its beginning comes from the KV cache where a prompt had it."""
    if session is not None:
        check_number("recompute", recompute, 0, 1)
        started = time.monotonic()
        session._replace(tokens, call, recompute=recompute)
        run(engine.loop, compute(engine, session._context, _left(call, started)))
        with session.fork() as own:  # without the answer, which is no part of the text yet
            yield from iterate(engine.loop, own._pending(_left(call, started)))
        return
    with Session(engine, closes=True) as own:
        own.replace(tokens)
        yield from iterate(engine.loop, own._pending(call))


def _left(call: Call, started: float) -> Call:
    """Return a call whose time limit counts from `started`, a time of `time.monotonic`."""
    limit = call.options.time_limit_ms
    if limit is None:
        return call
    left = max(1, limit - round(1e3 * (time.monotonic() - started)))
    return replace(call, options=replace(call.options, time_limit_ms=left))


def _in_words(engine: Engine, gap: Gap) -> list[int]:
    files = "".join(f"{path}:\n{text}\n\n" for path, text in gap.extra)
    request = files + _REQUEST.format(prefix=gap.prefix, suffix=gap.suffix)
    return encode_conversation([Message("user", request)], engine.template, engine.tokenizer)


class InfillSampler:
    """llama.cpp's `infill` sampler as a logit filter: an answer ends early rather than late.

    Only tokens that `top_k`, `top_p` and `min_p` leave count. The end tokens are taken if they are
    somewhat probable; else tokens that begin alike count as one, and improbable ones are left out.

    Args:
        options: options of the answer; its temperature applies to the tokens left.
    """

    def __init__(self, tokenizer: Tokenizer, options: GenerationOptions) -> None:
        self._tokenizer = tokenizer
        listed = options.samplers
        self._options = options
        self._top_k = options.top_k if "top_k" in listed else 0
        self._top_p = options.top_p if "top_p" in listed else 1
        self._min_p = options.min_p if "min_p" in listed else 0
        self._ends = sorted(tokenizer.eos_ids | set(options.stop_tokens))

    def __call__(self, scores: NDArray[np.float32], sampled: Sequence[int]) -> None:
        """Set scores `[V]` to logarithms of the sampler's weights; -inf where it leaves none."""
        may_end = self._options.may_end(len(sampled))
        if not may_end:
            scores[self._ends] = -math.inf
        ids = top_k(scores, min(self._top_k or _MOST_CANDIDATES, _MOST_CANDIDATES))
        probabilities = softmax(scores[ids])
        kept = keep_top_p(probabilities, self._top_p)
        kept &= keep_min_p(probabilities, self._min_p)
        ids, probabilities = ids[kept], softmax(scores[ids[kept]])
        ends = np.isin(ids, self._ends)
        chosen = _chosen(probabilities, ends, [self._text(int(token)) for token in ids])
        if not chosen.any() and not may_end:
            ids, chosen = ids[:1], np.ones(1)
        elif not chosen.any():
            end = max(self._ends, key=lambda token: float(scores[token]))
            ids, chosen = np.array([end]), np.ones(1)
        scores.fill(-math.inf)
        left = chosen > 0
        scores[ids[left]] = np.log(chosen[left])

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


def _chosen(
    probabilities: NDArray[np.float64], ends: NDArray[np.bool_], texts: Sequence[str]
) -> NDArray[np.float64]:
    """Return weights of the candidates, most probable first; all 0 where an end token that is none
    of them has to be taken."""
    chosen = probabilities.copy()
    if 3 * chosen[ends].sum() * len(chosen) > chosen[~ends].sum():
        chosen[~ends] = 0
        return chosen
    _join(chosen, ends, texts)
    chosen[~ends & (chosen < _LEAST)] = 0
    others = np.count_nonzero(chosen[~ends])
    if others == 0:
        return chosen * ends
    chosen /= chosen.sum()
    chosen[~ends & (chosen < 1 / (others + 1))] = 0
    return chosen


def _join(chosen: NDArray[np.float64], ends: NDArray[np.bool_], texts: Sequence[str]) -> None:
    """Add a token's probability to a more probable one's, where one text begins the other."""
    # parts of characters say nothing
    read = [i for i, text in enumerate(texts) if text and "\ufffd" not in text and not ends[i]]
    for at, i in enumerate(read):
        text = texts[i]
        for j in read[at + 1 :]:
            if not (texts[j].startswith(text) or text.startswith(texts[j])):
                continue
            if chosen[i] and chosen[j]:
                more, less = (i, j) if chosen[i] >= chosen[j] else (j, i)
                chosen[more] += chosen[less]
                chosen[less] = 0
