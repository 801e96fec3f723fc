"""The field `samplers`: names of the samplers of an answer, in their order.

A sampler that is not listed does nothing. edgellm has one order, which is llama.cpp's default;
another one is refused where it would give other tokens.
"""

from __future__ import annotations

from typing import Any

from edgellm.generation_options import GenerationArguments
from edgellm.serve.http.fields import Fields, shown
from edgellm.serve.llama_cpp.fields import field_error

# llama.cpp's names of samplers by their one-letter names.
_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
_ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "nucleus": "top_p", "temp": "temperature"}
_ORDER = ("penalties", "top_k", "top_p", "min_p", "infill", "temperature")
# Arguments that switch a sampler off.
_NEUTRAL: dict[str, GenerationArguments] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}


def apply_samplers(fields: Fields, arguments: GenerationArguments) -> bool:
    """Switch off unlisted samplers in `arguments`, in place; return whether `infill` is listed.

    Raises:
        RequestError: a name is unknown, or the order is another than edgellm's.
    """
    names = _names(fields.get("samplers"))
    if names is None:
        return False
    greedy = arguments.get("temperature") == 0
    for name, neutral in _NEUTRAL.items():
        # a temperature of 0 takes the most probable token, listed or not
        if name not in names and not (name == "temperature" and greedy):
            arguments.update(neutral)
    active = [name for name in names if name in _ORDER and not _does_nothing(name, arguments)]
    if not greedy and active != sorted(active, key=_ORDER.index):
        raise field_error(
            "samplers", f"the order here is {', '.join(_ORDER)}; list them in it, or leave it out"
        )
    return "infill" in names


def _names(given: Any) -> list[str] | None:
    """Read the names of samplers, each once; None if the field is missing."""
    if given is None:
        return None
    if isinstance(given, str):
        wrong = [letter for letter in given if letter not in _LETTERS]
        if wrong:
            raise field_error("samplers", f"there is no sampler {shown(wrong[0])}")
        return list(dict.fromkeys(_LETTERS[letter] for letter in given))
    if not isinstance(given, list) or len(given) > 64:
        raise field_error("samplers", f"a list of names is expected, but got {shown(given)}")
    names = []
    for value in given:
        plain = value.replace("-", "_") if isinstance(value, str) else value
        name = _ALIASES.get(plain, plain) if isinstance(plain, str) else plain
        if name not in _LETTERS.values():
            allowed = ", ".join(_LETTERS.values())
            raise field_error("samplers", f"there is no {shown(value)}; allowed are {allowed}")
        names.append(name)
    return list(dict.fromkeys(names))


def _does_nothing(name: str, arguments: GenerationArguments) -> bool:
    neutral = _NEUTRAL.get(name)
    return neutral is not None and {**arguments, **neutral} == arguments
