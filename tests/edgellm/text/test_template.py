"""Chat templates: the same text as transformers renders, and no way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engine.loaded_model import open_template
from edgellm.errors import TemplateError
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import CHAT_TEMPLATE
from edgellm.text.template import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi <b> 'é' "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "loop variables": "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.first }}"
    "{{ loop.last }}{% if not loop.first %}{{ loop.previtem.role }}{% endif %}"
    "{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}{% endfor %}",
    "loop control": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{{ m.content | trim }}{% endfor %}",
    "concatenation": "{% set ns = namespace(t='') %}{% for m in messages %}"
    "{% set ns.t = ns.t ~ m.role ~ 1 ~ None %}{% endfor %}{{ ns.t }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ bos_token }}{{ eos_token }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}\n{%- if true -%} b {%- endif %}",
    "sized filters": "{{ messages | join('-', attribute='role') }}{{ ['a', 1] | join(d='+') }}"
    "{{ '%s: %5.1f%%' | format('x', 2) }}{{ '%(a)s' | format(a=3) }}{{ '%03d' % 7 }}"
    "{{ 'aXbX' | replace('X', 'YY') }}{{ 'aXbX' | replace('X', '', 1) }}{{ '{:>5}'.format(3) }}"
    "{{ ', '.join(['x', 'y']) }}{{ 'in 2024: {} of {}'.format(1, 'b') }}",
    "comparisons": "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 'a' in 'abc' }}{{ 'user' in messages[1] }}"
    "{{ messages[0] == messages[0] }}{{ messages != [] }}{{ (1, 2) not in [[1, 2]] }}{{ 2 in x }}",
    "slices": "{{ messages[1:] | length }}{{ messages[::-1][0].content }}{{ 'abc'[-2:] }}",
    "ordering": "{{ {'b': 1, 'A': [2]} | dictsort }}{{ ['b', 'A', 'b'] | unique | sort | join }}"
    "{{ [3, 1] | min }}{{ messages | sort(attribute='role') | map(attribute='role') | join }}",
    "escaping": "{{ '<b>' + ('<c>' | safe) }}{{ '<' | e }}{{ ('%s' | safe) % '<' }}",
    "literals": "{{ [1, 'a', none, 1.5] }}{{ {'a': (1, true)} }}{{ dict(a=1, **{'b': 2}) }}{{ x }}",
    "blocks": "{% set a %} x {% endset %}{% filter upper %}{{ a }}y{% endfilter %}"
    "{% macro f(v) %}[{{ v }}{{ caller() }}]{% endmacro %}{% call f(1) %}z{% endcall %}"
    "{% with b = 2 %}{{ b }}{% endwith %}{{ a | trim }}{{ 'a\nb' | indent(2, true) }}",
    "methods": "{{ messages[1].content.strip().split()[0].upper().replace('H', 'J') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_text_as_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    expected, _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    found = ChatTemplate(source, bos="<s>", eos="</s>").render(CHAT)
    assert found == expected[0]


def test_default_model(smollm2: Bundle) -> None:
    source = (smollm2.path / CHAT_TEMPLATE).read_text()
    assert ChatTemplate(source).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] | attr('x') }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
        "{% include 'other' %}",
        "{% import 'os' as os %}",
        "{% extends 'other' %}",
        "{{ 'é'.encode() }}",
        "{{ messages | pprint }}",
        "{{ messages is filter }}",
        "{{ cycler().next() }}",
        "{% for m in messages recursive %}{{ loop(m) }}{% endfor %}",
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises(TemplateError, match=r"failed|broken"):
        ChatTemplate(source).render(CHAT)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "line 1"),
        ("a\n{% block b %}{% endblock %}", "broken in line 2: chat templates have no `block`$"),
        ("ok\n{{ x | nothing }}", "nothing"),
        ("{{ undefined.attribute }}", "undefined"),
        ("{{ raise_exception('only user and assistant') }}", "only user and assistant"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("x" * ((1 << 17) + 1), "characters"),
        ("{% if true %}" * 101 + "{% endif %}" * 101, "broken: IndentationError"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "broken: SyntaxError"),
        ("{% break %}", "broken: SyntaxError"),
        (f"{{{{ {'1' * 5000} }}}}", "broken: ValueError"),
        (f"{{{{ 0x{'f' * 5000} }}}}", "broken: ValueError"),
        (f"{{{{ {'(' * 5000} }}}}", "broken: RecursionError"),
        ("{{ namespace() }}", "failed: TypeError: a Namespace has no text"),
        ("{{ raise_exception('x' * 10000) }}", "^.{,600}$"),
    ],
)
def test_errors_say_what_is_wrong(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render(CHAT)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    bundle: Any = SimpleNamespace(path=tmp_path)
    tokenizer: Any = SimpleNamespace(bos=None, eos=())
    (tmp_path / CHAT_TEMPLATE).write_bytes(b"\xff")
    with pytest.raises(TemplateError, match=rf"{CHAT_TEMPLATE}.*utf-8"):
        open_template(bundle, tokenizer)
