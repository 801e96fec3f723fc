"""A model that can call tools: what its template is like, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import LLM
from edgellm.text.template import ChatTemplate

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}<|user|>{{ m.role[0] }}:
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": {{
c.function.arguments | tojson }}}</call>{% endfor %}{{ '\n' }}{% endfor %}<|user|>a:"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "description": "Turn the light",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}},
                "required": ["on"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": "string", "enum": ["x", "y"]}},
                "required": ["to"],
            },
        },
    },
]


@contextmanager
def tool_template(llm: LLM) -> Iterator[None]:
    """Let a model have a template for tools and thoughts."""
    before, llm.engine.template = llm.engine.template, ChatTemplate(TEMPLATE)
    try:
        yield
    finally:
        llm.engine.template = before


class Dictated:
    """A logit filter that leaves one text.

    Args:
        fails: behind the text, with an error that no client may see.
    """

    def __init__(self, llm: LLM, text: str, *, fails: bool = False) -> None:
        tokenizer = llm.engine.tokenizer
        self._tokens = tokenizer.encode(text, add_bos=False, parse_special=True)
        self._end = min(tokenizer.eos_ids)
        self._fails = fails

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        at = len(tokens)
        if self._fails and at == len(self._tokens):
            raise RuntimeError("/secret/path")
        token = self._tokens[at] if at < len(self._tokens) else self._end
        kept = logits[token]
        logits[:] = -np.inf
        logits[token] = kept


def assert_valid(name: str, arguments: str) -> None:
    allowed: dict[str, Any] = {"turn": {"on": (True, False)}, "move": {"to": ("x", "y")}}
    values = json.loads(arguments)
    assert values.keys() == allowed[name].keys()
    assert all(value in allowed[name][key] for key, value in values.items())
