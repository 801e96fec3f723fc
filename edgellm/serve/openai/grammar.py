"""The form of answers in the fields of requests: OpenAI's, llama.cpp's and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from edgellm.serve.http.fields import Fields
from edgellm.serve.openai.messages import checked
from edgellm.serve.request_error import RequestError
from edgellm.text.grammar import Grammar

MAX_CHOICES = 1000
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def read_grammar(fields: Fields) -> Grammar | None:
    """Read the field that gives the form of answers; None: they are free text.

    Raises:
        RequestError: a field is wrong, or two fields give a form.
    """
    structured = fields.object("structured_outputs") or Fields({})
    given = {
        values.where + name: grammar
        for values, readers in ((fields, _READERS), (structured, _STRUCTURED))
        for name, read in readers.items()
        if (grammar := read(values, name)) is not None
    }
    if structured.get("structural_tag"):
        raise RequestError(
            "not_supported",
            "`structured_outputs.structural_tag` is not supported; leave it out, or use `grammar`",
            param="structured_outputs",
        )
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(
            "invalid_request",
            f"`{first}` and `{second}` both say what the answer is to look like; leave one out",
            param=second,
        )
    return next(iter(given.values()), None)


def _response_format(fields: Fields, name: str) -> Grammar | None:
    wanted = fields.object(name)
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_object":  # with a schema in llama.cpp's extension
        return _schema(wanted, "schema") or ANY_OBJECT
    if kind != "json_schema":
        return None
    given = wanted.object("json_schema")
    grammar = None if given is None else _schema(given, "schema")
    if grammar is None:
        raise RequestError("invalid_request", f"`{name}.json_schema.schema` is missing", param=name)
    return grammar


def _schema(fields: Fields, name: str) -> Grammar | None:
    """Read a JSON schema, an object or, as vLLM takes it, its text."""
    if isinstance(fields.get(name), str):
        return Grammar("json_schema", fields.required_text(name))
    schema = fields.object(name)
    return None if schema is None else Grammar("json_schema", json.dumps(schema.values))


def _grammar(fields: Fields, name: str) -> Grammar | None:
    text = fields.text(name)
    return checked(fields.where + name, lambda: Grammar.of(text)) if text else None


def _regex(fields: Fields, name: str) -> Grammar | None:
    text = fields.text(name)
    return checked(fields.where + name, lambda: Grammar("regex", text)) if text else None


def _choice(fields: Fields, name: str) -> Grammar | None:
    texts = fields.texts(name, MAX_CHOICES)
    return Grammar.one_of(texts) if texts else None


def _any_object(fields: Fields, name: str) -> Grammar | None:
    return ANY_OBJECT if fields.flag(name) else None


_Reader = Callable[[Fields, str], Grammar | None]
_READERS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
# Fields of vLLM's `structured_outputs`.
_STRUCTURED: Mapping[str, _Reader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
}
