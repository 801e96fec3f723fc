"""Generation options and other common fields of Ollama's requests."""

from __future__ import annotations

import json
import math
import re

from edgellm.generation_options import GenerationArguments
from edgellm.serve.http.fields import Fields
from edgellm.serve.openai.grammar import ANY_OBJECT
from edgellm.serve.openai.sampling import MOST_LOGPROBS, sampling_arguments
from edgellm.serve.request_error import RequestError
from edgellm.text.grammar import Grammar
from edgellm.text.template import Scalar

_LARGEST = 1 << 31
_EFFORTS = ("low", "medium", "high")
# Samplers that edgellm lacks, each with the values that switch it off.
_ABSENT = {"tfs_z": (0, 1)}
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"(-?)((?:{_PART})+)")


def generation_arguments(fields: Fields) -> GenerationArguments:
    """Read the generation options in the fields `options`, `top_logprobs` and `shift`.

    Options for loading a model (`num_ctx`, `num_gpu` ...) are the server's, and are not read.
    """
    options = fields.object("options") or Fields({}, "options.")
    for name, off in _ABSENT.items():
        value = options.number(name, -_LARGEST, _LARGEST) if name in options else None
        if value not in (None, *off):
            raise options.wrong(name, f"{off[-1]}: there is no such sampler here")
    arguments = sampling_arguments(options)
    limit = options.whole("num_predict", -2, _LARGEST)
    if limit is not None:
        arguments["max_tokens"] = limit if limit > 0 else None
    keep = options.whole("num_keep", -1, _LARGEST)
    if keep is not None and keep >= 0:
        arguments["keep"] = keep
    if fields.flag("shift"):
        arguments["context_policy"] = "shift"
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if top:
        arguments["logprobs"] = top
    return arguments


def read_format(fields: Fields) -> Grammar | None:
    """Read the JSON schema of `format`; None if there is none."""
    value = fields.get("format")
    if value is None or value == "":
        return None
    if value == "json":
        return ANY_OBJECT
    if isinstance(value, dict):
        return Grammar("json_schema", json.dumps(value))
    raise fields.wrong("format", 'a JSON schema, or "json"')


def thinking_hints(fields: Fields) -> dict[str, Scalar]:
    """Read `think` as variables of the chat template."""
    value = fields.get("think")
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"enable_thinking": value}
    if value in _EFFORTS:
        return {"enable_thinking": True, "reasoning_effort": str(value)}
    raise fields.wrong("think", f"true, false, or one of {', '.join(_EFFORTS)}")


def read_keep_alive(fields: Fields) -> float | None:
    """Read the seconds that an idle model stays loaded after a request; infinite: for ever.

    The field has a number of seconds, or a duration in Go's form, such as `1h30m`. A negative one
    means for ever. None: the field is missing.
    """
    value = fields.get("keep_alive")
    if value is None or value == "":
        return None
    seconds = _seconds(value)
    if seconds is None:
        raise fields.wrong("keep_alive", 'a number of seconds, or a duration such as "5m"')
    return seconds if seconds >= 0 else math.inf


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < _LARGEST else None
    if not isinstance(value, str) or len(value) > 100:
        return None
    if re.fullmatch(r"-?\d{1,9}", value):
        return float(value)
    match = _DURATION.fullmatch(value)
    if match is None:
        return None
    seconds = sum(float(n) * _UNITS[unit] for n, unit in re.findall(_PART, match[2]))
    return -seconds if match[1] else seconds


def refuse(fields: Fields, name: str, why: str) -> None:
    """Refuse a field that is not missing or empty."""
    if fields.get(name):
        where = fields.where + name
        raise RequestError("not_supported", f"`{where}` is not supported: {why}", param=where)
