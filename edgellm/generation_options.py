"""How tokens are chosen and when an answer ends: what a caller says, else the model's own."""

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
from edgellm.store.generation_defaults import tried_defaults
from edgellm.store.manifest import Manifest

ContextPolicy = Literal["error", "shift"]
CONTEXT_POLICIES: tuple[str, ...] = get_args(ContextPolicy)

# Lowest and highest value, and whether it is a whole number.
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
# Beyond it a bias would drown float32 scores.
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
    stop: list[str]
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
    """How tokens are chosen and when to stop. The defaults are llama.cpp's.

    Attributes:
        temperature: 0 always takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that make up this probability.
        min_p: keep tokens at least this probable relative to the most likely one.
        repeat_penalty: divides positive and multiplies negative logits of recent tokens
            (CTRL, Keskar et al., arXiv:1909.05858).
        presence_penalty: subtracted once from the logit of each recent token.
        frequency_penalty: subtracted for each time that a recent token occurs.
        repeat_last_n: how many tokens count as recent; 0 none, -1 all.
        logit_bias: added to the logits of these tokens.
        seed: the same seed gives the same text; None draws one.
        max_tokens: stop after this many; None goes on to the end of the answer or of the context,
            or until it only repeats itself (`repetition_limit`).
        min_tokens: take no end token before so many; stop texts and `max_tokens` end the answer all
            the same.
        context_policy: what to do when the context is full. error: a prompt that is too long is an
            error, an answer ends. shift: forget half of what stands behind the first `keep` tokens,
            the oldest, and go on; `Stats.dropped_tokens` says how many were forgotten.
        keep: first tokens that `shift` never forgets; the attention of most models needs the first
            few (StreamingLLM, Xiao et al., arXiv:2309.17453).
        stop: texts that end the answer and are not part of it.
        stop_tokens: likewise, beside the model's own end tokens.
        min_indent: stop before a line that is indented by fewer characters; 0 never does.
        time_limit_ms: stop after this time, prefill included; None never does.
        line_limit_ms: stop with the first end of a line later than this after the first token; None
            never does.
        priority: among answers of one owner that are on their way at once, a larger one goes first.
        owner: whose answer it is, such as the user of a program that serves several. Those who have
            answers on their way at once get equally many tokens computed, however many answers each
            wants.
        logprobs: report this many most likely tokens at each step.
        ignore_eos: never take an end token.
        repetition_limit: end an answer whose last so many tokens only say the same again and again,
            if neither `max_tokens` nor `ignore_eos` is set; 0 never does.
        speculate: check guesses of several tokens in one step where that is faster (see
            `speculation.py`); the answer is the same.
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
            OptionError: one is of another type than it should be, or not allowed.
        """
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                check_number(name, value, low, high, whole=whole)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("speculate", self.speculate)
        check_choice("context_policy", self.context_policy, CONTEXT_POLICIES)
        check_texts("stop", self.stop)
        check_text("owner", self.owner)
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(
                f"`logit_bias` is {self.logit_bias!r}; a dict of token ids and numbers is expected"
            )
        for token, bias in self.logit_bias.items():
            check_number("logit_bias", token, 0, whole=True)
            if bias != -math.inf:  # which rules a token out
                check_number("logit_bias", bias, -_MOST_BIAS, _MOST_BIAS)
        if isinstance(self.stop_tokens, str) or not isinstance(self.stop_tokens, Sequence):
            raise OptionError(
                f"`stop_tokens` is {self.stop_tokens!r}; a list of token ids is expected"
            )
        for token in self.stop_tokens:
            check_number("stop_tokens", token, 0, whole=True)

    def may_end(self, sampled: int) -> bool:
        """Whether an end token may come behind so many tokens of the answer."""
        return not self.ignore_eos and sampled >= self.min_tokens


def chosen_options(
    manifest: Manifest, options: GenerationOptions | None, arguments: GenerationArguments
) -> GenerationOptions:
    """The fields given over `options`, or else over what is usual for a model: its own, those tried
    for it, llama.cpp's.

    Those tried (see `generation_defaults.py`) are for models whose files name none, and do not
    count with a temperature of 0, which is plain greedy.
    """
    if options is not None:
        return changed_options(options, arguments)
    check_names(arguments, GenerationOptions)
    tried = {} if arguments.get("temperature") == 0 else tried_defaults(manifest.source)
    return GenerationOptions(**{**tried, **manifest.generation, **arguments})


def changed_options(
    options: GenerationOptions, arguments: GenerationArguments
) -> GenerationOptions:
    """Options with other values in the fields that are given.

    Raises:
        OptionError: the options are something else, or a value is not allowed.
        TypeError: an argument is none of their fields.
    """
    if not isinstance(options, GenerationOptions):
        raise OptionError(f"`options` is {options!r}; an edgellm.GenerationOptions is expected")
    check_names(arguments, GenerationOptions)
    return replace(options, **arguments)
