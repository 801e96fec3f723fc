"""Options for the choice of tokens and the end of an answer: the caller's, else the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, get_args

from edgellm.checks import (
    check_choice,
    check_flag,
    check_names,
    check_number,
    check_text,
    check_texts,
)
from edgellm.errors import OptionError
from edgellm.store.manifest import Manifest
from edgellm.store.sources import ALIASES, DEFAULT_MODEL

ContextPolicy = Literal["error", "shift"]
CONTEXT_POLICIES: tuple[str, ...] = get_args(ContextPolicy)

# Lowest and highest value of each field, and whether only whole numbers are allowed.
_RANGES: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_k": (0, math.inf, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, False),
    "repeat_penalty": (0.01, 100, False),
    "presence_penalty": (-100, 100, False),
    "frequency_penalty": (-100, 100, False),
    "repeat_last_n": (-1, math.inf, True),
    "seed": (0, 2**64 - 1, True),
    "max_tokens": (0, math.inf, True),
    "min_tokens": (0, math.inf, True),
    "keep": (0, math.inf, True),
    "min_indent": (0, 1000, True),
    "time_limit_ms": (1, math.inf, True),
    "line_limit_ms": (1, math.inf, True),
    "priority": (-1000, 1000, True),
    "logprobs": (0, 100, True),
    "repetition_limit": (0, 65536, True),
}
MAY_BE_NONE = ("seed", "max_tokens", "time_limit_ms", "line_limit_ms")
# Largest bias: a larger one would drown float32 scores.
_MOST_BIAS = 1_000_000


class GenerationArguments(TypedDict, total=False):
    """The fields of `GenerationOptions` as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: dict[int, float]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    context_policy: ContextPolicy
    keep: int
    stop: str | list[str]
    stop_tokens: list[int]
    min_indent: int
    time_limit_ms: int | None
    line_limit_ms: int | None
    priority: int
    owner: str
    logprobs: int
    ignore_eos: bool
    repetition_limit: int
    speculate: bool


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for the choice of tokens and the end of an answer. The defaults are llama.cpp's.

    Attributes:
        temperature: divisor of the logits; 0: always the most likely token.
        top_k: number of most likely tokens that are kept; 0: all.
        top_p: probability that the most likely tokens make up together, which are kept.
        min_p: least probability of a token that is kept, relative to the most likely token's.
        repeat_penalty: factor that divides positive and multiplies negative logits of recent tokens
            (CTRL, Keskar et al., arXiv:1909.05858).
        presence_penalty: number subtracted once from the logit of each recent token.
        frequency_penalty: number subtracted for each time that a recent token occurs.
        repeat_last_n: number of last tokens that count as recent; 0: none, -1: all.
        logit_bias: numbers added to the logits, by token id.
        seed: seed of the sampler; the same seed gives the same text, None draws one.
        max_tokens: number of tokens after which the answer ends; None: it goes on to its own end or
            the end of the context, or until it only repeats itself (`repetition_limit`).
        min_tokens: number of tokens before which no end token is taken; stop texts and `max_tokens`
            end the answer all the same.
        context_policy: behaviour when the context is full. error: a prompt that is too long is an
            error, an answer ends. shift: the older half of the tokens behind the first `keep` is
            forgotten, and the answer goes on; `Stats.dropped_tokens` counts the forgotten tokens.
        keep: number of first tokens that `shift` never forgets; the attention of most models needs
            the first few (StreamingLLM, Xiao et al., arXiv:2309.17453).
        stop: text, or texts, that end the answer and are not part of it.
        stop_tokens: token ids that end the answer, beside the model's own end tokens.
        min_indent: least indentation in characters; the answer stops before a line that is indented
            by fewer; 0: never.
        time_limit_ms: time after which the answer stops, prefill included; None: never.
        line_limit_ms: time after the first token from which on the answer stops at the end of a
            line; None: never.
        priority: rank among answers of one owner that are on their way at once; larger goes first.
        owner: name of the answer's owner, such as the user of a program that serves several. Owners
            with answers on their way at once get equally many tokens computed, however many answers
            each wants.
        logprobs: number of most likely tokens that are reported at each step.
        ignore_eos: whether no end token is ever taken.
        repetition_limit: number of last tokens that end the answer if they are one sequence over
            and over, where neither `max_tokens` nor `ignore_eos` is set; 0: never.
        speculate: whether guesses of several tokens are checked in one step where that is faster
            (see `speculation.py`); the answer is the same.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    context_policy: ContextPolicy = "error"
    keep: int = 4
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    min_indent: int = 0
    time_limit_ms: int | None = None
    line_limit_ms: int | None = None
    priority: int = 0
    owner: str = ""
    logprobs: int = 0
    ignore_eos: bool = False
    repetition_limit: int = 256
    speculate: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value has the wrong type, or is not allowed.
        """
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                check_number(name, value, low, high, whole=whole)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("speculate", self.speculate)
        check_choice("context_policy", self.context_policy, CONTEXT_POLICIES)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_texts("stop", self.stop)
        check_text("owner", self.owner)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(
                f"`logit_bias` is {self.logit_bias!r}; a dict of token ids and numbers is expected"
            )
        for token, bias in self.logit_bias.items():
            check_number("logit_bias", token, 0, whole=True)
            if bias != -math.inf:  # minus infinity rules a token out
                check_number("logit_bias", bias, -_MOST_BIAS, _MOST_BIAS)
        if isinstance(self.stop_tokens, str) or not isinstance(self.stop_tokens, Sequence):
            raise OptionError(
                f"`stop_tokens` is {self.stop_tokens!r}; a list of token ids is expected"
            )
        for token in self.stop_tokens:
            check_number("stop_tokens", token, 0, whole=True)

    def may_end(self, sampled: int) -> bool:
        """Whether an end token may come behind `sampled` tokens of the answer."""
        return not self.ignore_eos and sampled >= self.min_tokens


# Temperature and top_p are those of SmolLM2's model card. Of 30 seeds, "Name the capital of
# France." is answered with Paris by 30, "What is the capital of France?" by 27 (18 with temperature
# 0.8): there "The" and "L" are nearly as likely in float32 too. With the penalty none of ten
# long answers ended in a loop (4 without, at 0.8, and 7 at 0.4).
_TRIED: Mapping[str, Mapping[str, float]] = {
    ALIASES[DEFAULT_MODEL]: {"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1},
}


def tried_defaults(source: str) -> Mapping[str, float]:
    """Return sampling defaults that trials have shown to suit a model source; empty if none."""
    return _TRIED.get(source, {})


def chosen_options(
    manifest: Manifest, options: GenerationOptions | None, arguments: GenerationArguments
) -> GenerationOptions:
    """Return `options` with the given fields in their place; without `options`, the model's.

    A model's options are its own, else those tried for it, else llama.cpp's. Options that were
    tried are for models whose files name none. They do not count with a temperature of 0, which is
    plain greedy.
    """
    if options is not None:
        return changed_options(options, arguments)
    check_names(arguments, GenerationOptions)
    tried = {} if arguments.get("temperature") == 0 else tried_defaults(manifest.source)
    return GenerationOptions(**{**tried, **manifest.generation, **arguments})


def changed_options(
    options: GenerationOptions, arguments: GenerationArguments
) -> GenerationOptions:
    """Return options with other values in the fields that are given.

    Raises:
        OptionError: `options` is no `GenerationOptions`, or a value is not allowed.
        TypeError: an argument is no field of the options.
    """
    if not isinstance(options, GenerationOptions):
        raise OptionError(f"`options` is {options!r}; an edgellm.GenerationOptions is expected")
    check_names(arguments, GenerationOptions)
    return replace(options, **arguments)
