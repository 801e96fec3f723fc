"""Generation options in the fields of `/completion` and `/infill`, read by llama.cpp's rules.

A number beyond a soft limit is moved to the limit; beyond a hard limit it is an error. Options that
edgellm lacks are refused where they would change the answer, and ignored otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.serve.http.fields import MAX_STOPS, Fields, shown
from edgellm.serve.openai.sampling import NUMBERS, leave_usual
from edgellm.serve.request_error import RequestError

INT32_MAX = 2**31 - 1
_MOST_BIAS = 1_000_000
# Seeds that ask for a random one: -1, and -1 as an unsigned number of 32 and of 64 bits.
_ANY_SEED = (-1, 2**32 - 1, 2**64 - 1)
# Name of the field and of the option, lowest and highest value of a whole number (hard limits).
_WHOLE: tuple[tuple[str, int, int], ...] = (
    ("repeat_last_n", -1, INT32_MAX),
    ("dry_allowed_length", 0, 1000),
    ("dry_penalty_last_n", -1, INT32_MAX),
    ("min_keep", 0, INT32_MAX),
)
# Hard limits of whole numbers that have no effect here: contexts are not shifted, slots are not
# chosen, and the prefix that a prompt shares with earlier ones is always found in the KV cache.
_WITHOUT_EFFECT: Mapping[str, tuple[int, int]] = {
    "id_slot": (-1, INT32_MAX),
    "n_keep": (-1, INT32_MAX),
    "n_discard": (0, INT32_MAX),
    "sse_ping_interval": (-1, INT32_MAX),
}


def hard(fields: Fields, names: tuple[str, ...], low: int, high: int) -> int | None:
    """Read the first given field of `names`, a whole number within hard limits; None: none given.

    Raises:
        RequestError: the value is no whole number, or beyond the limits.
    """
    for name in names:
        value = fields.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise field_error(name, f"a whole number is expected, but got {shown(value)}")
        if not low <= value <= high:
            raise field_error(
                name, f"Value must be between {low} <= value <= {high}, but got {value}"
            )
        return value
    return None


def soft(fields: Fields, name: str, low: float, high: float) -> float | None:
    """Read a number, moved to the nearest allowed one (soft limits); None if it is missing.

    Raises:
        RequestError: the value is no number.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise field_error(name, f"a number is expected, but got {shown(value)}")
    # a JSON number may be too large for a float, so the value is not converted before it is limited
    return min(high, max(low, value))


def generation_arguments(fields: Fields) -> GenerationArguments:
    """Read the generation options that the request gives.

    Raises:
        RequestError: a value is not allowed, or asks for an option that edgellm lacks.
    """
    refuse_unsupported(fields)
    arguments: GenerationArguments = {}
    for name, (lowest, highest) in NUMBERS.items():
        number = soft(fields, name, lowest, highest)
        if number is not None:
            arguments[name] = float(number)  # type: ignore[literal-required]
    leave_usual(arguments)
    top_k = soft(fields, "top_k", 0, INT32_MAX)
    if top_k is not None:
        arguments["top_k"] = int(top_k)
    n_probs = soft(fields, "n_probs" if "n_probs" in fields else "logprobs", 0, 100)
    if n_probs is not None:
        arguments["logprobs"] = int(n_probs)
    for name, low, high in _WHOLE:
        whole = hard(fields, (name,), int(low), int(high))
        if whole is not None:
            arguments[name] = whole  # type: ignore[literal-required]
    breakers = fields.texts("dry_sequence_breakers", MAX_STOPS)
    if breakers:
        arguments["dry_sequence_breakers"] = breakers
    mirostat = hard(fields, ("mirostat",), 0, 2)
    if mirostat == 1:
        raise unsupported("mirostat", "2 is the version that is here")
    if mirostat is not None:
        arguments["mirostat"] = mirostat
    seed = hard(fields, ("seed",), -(2**63), 2**64 - 1)
    if seed is not None and seed not in _ANY_SEED:
        arguments["seed"] = seed % 2**64
    if fields.flag("ignore_eos"):
        arguments["ignore_eos"] = True
    guessed = hard(fields, ("speculative.n_max",), 0, INT32_MAX)
    if guessed is not None:
        arguments["speculate_most"] = guessed
    return {**arguments, **_ends(fields)}


def _ends(fields: Fields) -> GenerationArguments:
    """Read the options that end an answer: token limit, indent, time limit and stop texts."""
    arguments: GenerationArguments = {}
    count = hard(fields, ("n_predict", "max_completion_tokens", "max_tokens"), -1, INT32_MAX)
    if count is not None:
        arguments["max_tokens"] = None if count == -1 else count
    indent = hard(fields, ("n_indent",), 0, INT32_MAX)
    if indent:
        arguments["min_indent"] = min(indent, 1000)
    limit = hard(fields, ("t_max_predict_ms",), -1, 2**63 - 1)
    if limit is not None and limit > 0:
        arguments["line_limit_ms"] = limit
    stop = [text for text in fields.texts("stop", MAX_STOPS) if text]
    if any(len(text) > 1000 for text in stop):
        raise fields.wrong("stop", "strings of at most 1000 characters")
    if stop:
        arguments["stop"] = stop
    return arguments


def refuse_unsupported(fields: Fields) -> None:
    """Refuse options that edgellm lacks and that would change the answer.

    Raises:
        RequestError: a field has such an option, or a value beyond its hard limits.
    """
    for name, (low, high) in _WITHOUT_EFFECT.items():
        hard(fields, (name,), low, high)
    target = soft(fields, "adaptive_target", -math.inf, 1)
    if target is not None and target >= 0:
        raise unsupported("adaptive_target")
    for name in ("echo", "post_sampling_probs", "grammar_lazy"):
        if fields.flag(name):
            raise unsupported(name)
    lora(fields)
    for name in ("cache_prompt", "backend_sampling", "verbose"):
        fields.flag(name)


def lora(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    """Read numbers and scales of adapters; None: the request gives none.

    Raises:
        RequestError: the field is no list of adapters.
    """
    if fields.get("lora") is None:
        return None
    return tuple(
        (each.whole("id", 0, INT32_MAX) or 0, each.number("scale", -1000, 1000) or 0.0)
        for each in fields.objects("lora", 64)
    )


def logit_bias(fields: Fields) -> list[tuple[int | str, float]]:
    """Read pairs of a token id, or a text that means all its tokens, and a logit bias.

    Raises:
        RequestError: the field is neither a list of pairs nor an object, or a pair is wrong.
    """
    given = fields.get("logit_bias")
    if given is None:
        return []
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or len(pairs) > 100_000:
        raise field_error("logit_bias", "a list of pairs, or an object, is expected")
    biases = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise field_error("logit_bias", f"a pair is expected, but got {shown(pair)}")
        biases.append((_biased(pair[0], from_key=isinstance(given, dict)), _bias(pair[1])))
    return biases


def _biased(token: Any, *, from_key: bool) -> int | str:
    if from_key and token.isdecimal() and len(token) <= 10:
        return int(token)
    if isinstance(token, str):
        return token
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= INT32_MAX:
        raise field_error("logit_bias", f"a token id is expected, but got {shown(token)}")
    return token


def _bias(value: Any) -> float:
    if value is False:
        return -math.inf
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise field_error("logit_bias", f"a number or false is expected, but got {shown(value)}")
    return float(min(_MOST_BIAS, max(-_MOST_BIAS, value)))


def unsupported(name: str, advice: str = "") -> RequestError:
    """Return the error of a field whose value asks for an option that edgellm lacks."""
    message = f"Field '{name}': this value is not supported by this server; leave it out"
    return RequestError("not_supported", message + (f"; {advice}" if advice else ""), param=name)


def field_error(name: str, message: str) -> RequestError:
    return RequestError("invalid_request", f"Field '{name}': {message}", param=name)
