"""The form of answers in the fields of requests: OpenAI's, llama.cpp's and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable

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
    readers: dict[str, tuple[Fields, str, Callable[[Fields, str], Grammar | None]]] = {
        "response_format": (fields, "response_format", _response_format),
        "json_schema": (fields, "json_schema", _schema),
        "grammar": (fields, "grammar", _grammar),
        "guided_json": (fields, "guided_json", _schema),
        "guided_regex": (fields, "guided_regex", _regex),
        "guided_choice": (fields, "guided_choice", _choice),
        "guided_grammar": (fields, "guided_grammar", _grammar),
        "structured_outputs.json": (structured, "json", _schema),
        "structured_outputs.regex": (structured, "regex", _regex),
        "structured_outputs.choice": (structured, "choice", _choice),
        "structured_outputs.grammar": (structured, "grammar", _grammar),
        "structured_outputs.json_object": (structured, "json_object", _any_object),
    }
    found = {
        name: grammar
        for name, (values, key, read) in readers.items()
        if (grammar := read(values, key)) is not None
    }
    if structured.get("structural_tag"):
        raise RequestError(
            "not_supported",
            "`structured_outputs.structural_tag` is not supported; leave it out, or use `grammar`",
            param="structured_outputs",
        )
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(
            "invalid_request",
            f"`{first}` and `{second}` both say what the answer is to look like; leave one out",
            param=second,
        )
    return next(iter(found.values()), None)


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
