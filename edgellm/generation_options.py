"""Options for the choice of tokens and the end of an answer: the caller's, else the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

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


class FullContext:
    """Rule for a full context: a prompt that is too long is an error, and an answer ends."""

    forgets = False

    def forgotten(self, length: int, *, ctx_size: int, keep: int) -> int:
        """Count the tokens of `length` to forget behind the first `keep`.

        Raises:
            OptionError: `keep` leaves no room.
        """
        return 0


class Shift(FullContext):
    """Rule that forgets the older half of what stands behind the first tokens."""

    forgets = True

    def forgotten(self, length: int, *, ctx_size: int, keep: int) -> int:
        window = (ctx_size - keep) // 2
        if window < 1:
            raise OptionError(
                f"`keep` is {keep}; in a context of {ctx_size} tokens 0 to {ctx_size - 2} is "
                "allowed"
            )
        return max(0, length - window - keep)


CONTEXT_POLICIES: Mapping[ContextPolicy, FullContext] = {"error": FullContext(), "shift": Shift()}

# Names of llama.cpp's samplers, in its usual order.
SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
# Longest text that ends a repetition: llama.cpp cuts longer ones.
_LONGEST_BREAKER = 40

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
    "typical_p": (0, 1, False),
    "top_n_sigma": (0, 100, False),
    "xtc_probability": (0, 1, False),
    "xtc_threshold": (0, 1, False),
    "dynatemp_range": (0, 100, False),
    "dynatemp_exponent": (0, 100, False),
    "dry_multiplier": (0, 100, False),
    "dry_base": (1, 100, False),
    "dry_allowed_length": (0, 1000, True),
    "dry_penalty_last_n": (-1, math.inf, True),
    "mirostat_tau": (0, 100, False),
    "mirostat_eta": (0, 1, False),
    "min_keep": (0, math.inf, True),
    "seed": (0, 2**64 - 1, True),
    "max_tokens": (0, math.inf, True),
    "min_tokens": (0, math.inf, True),
    "keep": (0, math.inf, True),
    "min_indent": (0, 1000, True),
    "time_limit_ms": (1, math.inf, True),
    "line_limit_ms": (1, math.inf, True),
    "priority": (-1000, 1000, True),
    "logprobs": (0, 100, True),
    "prompt_logprobs": (0, 100, True),
    "repetition_limit": (0, 65536, True),
    "speculate_most": (0, math.inf, True),
}
MAY_BE_NONE = (
    "seed",
    "max_tokens",
    "time_limit_ms",
    "line_limit_ms",
    "prompt_logprobs",
    "speculate_most",
    "adapter",
)
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
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    min_keep: int
    samplers: list[str]
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
    prompt_logprobs: int | None
    ignore_eos: bool
    repetition_limit: int
    speculate: bool
    speculate_most: int | None
    adapter: str | None


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
        typical_p: probability that the tokens make up together whose surprise is nearest to the
            entropy, which are kept (locally typical sampling); 1: all.
        top_n_sigma: number of standard deviations below the highest logit down to which tokens are
            kept; 0: all.
        xtc_probability: probability with which, at a step, the most likely tokens are left out
            (XTC, exclude top choices).
        xtc_threshold: least probability of the tokens left out; the least likely of them stays.
        dynatemp_range: largest difference of the temperature in use from `temperature`, which is
            not 0; it grows with the entropy of the tokens that are left.
        dynatemp_exponent: power of the entropy, as a share of the largest possible one, that the
            temperature follows.
        dry_multiplier: penalty of a token that goes on with a repetition of `dry_allowed_length`
            tokens (DRY, don't repeat yourself); 0: none.
        dry_base: factor by which each further repeated token raises the penalty.
        dry_allowed_length: number of repeated tokens from which on there is a penalty.
        dry_penalty_last_n: number of last tokens in which repetitions are looked for; -1: all.
        dry_sequence_breakers: texts behind which a repetition begins anew.
        mirostat: 2 keeps the mean surprise of tokens at a target (Mirostat 2.0), with
            `temperature` and no other sampler; 0: it is not used.
        mirostat_tau: target of the mean surprise, in bits.
        mirostat_eta: share of its error by which each token corrects the limit on the surprise.
        min_keep: number of tokens that `typical_p`, `top_p`, `min_p` and XTC leave at least.
        samplers: names of the samplers that are used, in order. A `temperature` of 0 takes the most
            likely token that they leave, listed or not.
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
        prompt_logprobs: number of most likely tokens that are reported for each token of the
            prompt, with the token's own log-probability; all of the prompt is computed then. None:
            nothing is reported. Not with `context_policy` shift.
        ignore_eos: whether no end token is ever taken.
        repetition_limit: number of last tokens that end the answer if they are one sequence over
            and over, where neither `max_tokens` nor `ignore_eos` is set; 0: never.
        speculate: whether guesses of several tokens are checked in one step where that is faster
            (see `speculation.py`); the answer is the same.
        speculate_most: largest number of tokens that are guessed for one step; None: as many as
            pay.
        adapter: name of a loaded adapter (LoRA) that changes the model for this answer; None: the
            model as it is, or in a session the session's own.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    samplers: Sequence[str] = SAMPLERS
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
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    repetition_limit: int = 256
    speculate: bool = True
    speculate_most: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value has the wrong type, or is not allowed.
        """
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                check_number(name, value, low, high, whole=whole)
        self._check_samplers()
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("speculate", self.speculate)
        check_choice("context_policy", self.context_policy, CONTEXT_POLICIES)
        if self.prompt_logprobs is not None and self.when_full.forgets:
            raise OptionError(
                "`prompt_logprobs` needs all of the prompt, and `context_policy` "
                f"{self.context_policy} may forget a part of it; leave out one of them"
            )
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_texts("stop", self.stop)
        check_text("owner", self.owner)
        if self.adapter is not None:
            check_text("adapter", self.adapter)
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

    @property
    def when_full(self) -> FullContext:
        """Rule for a full context, which `context_policy` names."""
        return CONTEXT_POLICIES[self.context_policy]

    def _check_samplers(self) -> None:
        if self.mirostat not in (0, 2) or isinstance(self.mirostat, bool):
            raise OptionError(f"`mirostat` is {self.mirostat!r}; allowed are 0 and 2")
        check_texts("dry_sequence_breakers", self.dry_sequence_breakers)
        if any(len(text) > _LONGEST_BREAKER for text in self.dry_sequence_breakers):
            raise OptionError(
                f"`dry_sequence_breakers` has a text of more than {_LONGEST_BREAKER} characters"
            )
        check_texts("samplers", self.samplers)
        for name in self.samplers:
            check_choice("samplers", name, SAMPLERS)
        if len(set(self.samplers)) < len(self.samplers):
            raise OptionError(f"`samplers` is {self.samplers!r}; list each name once")

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
    given = {**manifest.generation, **arguments}
    tried = {} if given.get("temperature") == 0 else tried_defaults(manifest.source)
    return GenerationOptions(**{**tried, **given})


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
