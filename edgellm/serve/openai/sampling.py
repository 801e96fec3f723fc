"""Sampling options in the fields of OpenAI's requests, with llama.cpp's and vLLM's extensions."""

from __future__ import annotations

import math

from edgellm.generation_options import GenerationArguments
from edgellm.serve.http.fields import MAX_BIASES, MAX_STOPS, Fields, shown
from edgellm.serve.request_error import RequestError

NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    # llama.cpp's and vLLM's extensions
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (0, 100),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
}
# Fields of other servers that are refused because they would change the answer, and the field to
# use instead. Values that are false, 0 or empty are ignored.
_NOT_HERE = {
    "functions": "use `tools`",
    "lora": "name the adapter as `model`",
}
MOST_TOKENS = 1 << 31
MOST_MS = 1 << 40
MOST_LOGPROBS = 20


def sampling_arguments(fields: Fields) -> GenerationArguments:
    """Read the generation options that the request gives, within hard ranges.

    Raises:
        RequestError: a value is not allowed.
    """
    arguments: GenerationArguments = {}
    for name, (low, high) in NUMBERS.items():
        value = fields.number(name, low, high)
        if value is not None:
            arguments[name] = value  # type: ignore[literal-required]
    for name, low, high in (
        ("top_k", -1, MOST_TOKENS),
        ("repeat_last_n", -1, MOST_TOKENS),
        ("dry_allowed_length", 0, 1000),
        ("dry_penalty_last_n", -1, MOST_TOKENS),
        ("mirostat", 0, 2),
        ("min_keep", 0, MOST_TOKENS),
        ("min_tokens", 0, MOST_TOKENS),
        ("priority", -1000, 1000),
        ("time_limit_ms", 1, MOST_MS),
        ("speculate_most", 0, MOST_TOKENS),
    ):
        whole = fields.whole(name, int(low), int(high))
        if whole is not None:
            arguments[name] = whole  # type: ignore[literal-required]
    if "repeat_penalty" not in arguments:
        penalty = fields.number("repetition_penalty", *NUMBERS["repeat_penalty"])  # vLLM's name
        if penalty is not None:
            arguments["repeat_penalty"] = penalty
    if arguments.get("mirostat") == 1:
        raise fields.wrong("mirostat", "0 or 2; Mirostat 1 is not here")
    leave_usual(arguments)
    if fields.get("dry_sequence_breakers") is not None:
        arguments["dry_sequence_breakers"] = fields.texts("dry_sequence_breakers", MAX_STOPS)
    if fields.get("samplers") is not None:
        arguments["samplers"] = _samplers(fields)
    if arguments.get("top_k") == -1:  # vLLM's value for all tokens
        arguments["top_k"] = 0
    stop = fields.texts("stop", MAX_STOPS)
    if stop:
        arguments["stop"] = stop_texts(fields, stop)
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    if seed is not None and seed != -1:
        arguments["seed"] = seed % 2**64
    if fields.flag("ignore_eos"):
        arguments["ignore_eos"] = True
    speculate = fields.flag("speculate")
    if speculate is not None:
        arguments["speculate"] = speculate
    bias = logit_bias(fields)
    if bias:
        arguments["logit_bias"] = bias
    return arguments


def leave_usual(arguments: GenerationArguments) -> None:
    """Replace, in place, values by which clients of llama.cpp say: off, or as usual."""
    if "top_n_sigma" in arguments:
        arguments["top_n_sigma"] = max(0.0, arguments["top_n_sigma"])
    if arguments.get("dry_base", 1) < 1:
        del arguments["dry_base"]


# llama.cpp's names of samplers by their one-letter names, and other names of them.
_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
_ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "nucleus": "top_p", "temp": "temperature"}


def sampler_names(given: object) -> list[str]:
    """Read llama.cpp's list of samplers, names or a text of letters, each once.

    Raises:
        ValueError: a name is unknown, or it is no list; the message says what is allowed.
    """
    if isinstance(given, str):
        wrong = [letter for letter in given if letter not in _LETTERS]
        if wrong:
            raise ValueError(f"there is no sampler {shown(wrong[0])}")
        return list(dict.fromkeys(_LETTERS[letter] for letter in given))
    if not isinstance(given, list) or len(given) > 64:
        raise ValueError(f"a list of names is expected, but got {shown(given)}")
    names = []
    for value in given:
        plain = value.replace("-", "_") if isinstance(value, str) else ""
        name = _ALIASES.get(plain, plain)
        if name not in _LETTERS.values():
            allowed = ", ".join(_LETTERS.values())
            raise ValueError(f"there is no {shown(value)}; allowed are {allowed}")
        names.append(name)
    return list(dict.fromkeys(names))


def _samplers(fields: Fields) -> list[str]:
    try:
        names = sampler_names(fields.get("samplers"))
    except ValueError as error:
        raise RequestError("invalid_request", f"`samplers`: {error}", param="samplers") from None
    for name in ("infill", "adaptive_p"):
        if name in names:
            raise fields.wrong("samplers", f"a list without {name}, which is not here")
    return names


def refuse_unsupported(fields: Fields) -> None:
    """Refuse options that edgellm lacks and that would change the answer.

    Raises:
        RequestError: a field asks for such an option.
    """
    for name, advice in _NOT_HERE.items():
        if fields.get(name):
            raise unsupported(name, advice)


def unsupported(name: str, advice: str = "") -> RequestError:
    """Return the error of a field that asks for an option that edgellm lacks."""
    message = f"`{name}` is not supported; leave it out"
    return RequestError("not_supported", message + (f", or {advice}" if advice else ""), param=name)


def stop_texts(fields: Fields, stop: list[str]) -> list[str]:
    """Check the stop texts of an answer, which have 1 to 1000 characters, and return them."""
    if any(not text or len(text) > 1000 for text in stop):
        raise fields.wrong("stop", "strings of 1 to 1000 characters")
    return stop


def max_tokens(fields: Fields, *names: str) -> GenerationArguments:
    """Read the token limit from the first given field of `names`; -1: no limit."""
    for name in names:
        value = fields.whole(name, -1, MOST_TOKENS)
        if value is not None:
            return {"max_tokens": None if value == -1 else value}
    return {}


def logit_bias(fields: Fields) -> dict[int, float]:
    """Read `logit_bias`, an object of biases by token id; -100 or less excludes a token."""
    given = fields.object("logit_bias")
    if given is not None and len(given.values) > MAX_BIASES:
        raise RequestError(
            "invalid_request",
            f"`logit_bias` has {len(given.values)} tokens; at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    bias: dict[int, float] = {}
    for token in given.values if given is not None else ():
        if not token.isdecimal() or len(token) > 10:
            raise RequestError(
                "invalid_request",
                f"`logit_bias` has the key {token[:40]!r}; a token id is expected",
                param="logit_bias",
            )
        value = given.number(token, -1_000_000, 1_000_000) if given is not None else None
        if value is not None:
            bias[int(token)] = -math.inf if value <= -100 else value
    return bias
