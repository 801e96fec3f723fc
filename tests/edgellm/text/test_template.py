"""Chat templates: the same text as transformers renders, and no way out or on for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

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
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises(TemplateError, match="failed"):
        ChatTemplate(source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'A' * 10**9 }}",
        "{{ 10**10**10 }}",
        "{{ ([1] * 1000000) * 1000000 }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x' | indent(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '{:1000000000d}'.format(5) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ ['%9999999999d'] | format(1) }}",
        "{{ '%(a)9999999999d' % {'a': 1} }}",
        "{{ '%(a)9999999999d' | format(a=1) }}",
        "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
        "{{ ('%*d' * 1000) | format(1000000, 1) }}",
        "{{ ('{0:{1}}' * 1000).format(5, 1000000) }}",
        "{{ range(99999) | list | join('a' * 99999) | length }}",
        "{{ ('a' * 99999).join(range(99999) | map('string')) | length }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) | length }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) | length }}",
        "{{ ('a' * 1000) | replace('a', 'b' * 100000) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% set c = 1 %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x~n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x+n.x %}{% endfor %}",
        "{% for i in range(10**5) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_no_way_on_for_ever(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError, match=r"stopped|failed"):
        ChatTemplate(source, time_limit_s=0.5).render(CHAT)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "line 1"),
        ("ok\n{{ x | nothing }}", "nothing"),
        ("{{ undefined.attribute }}", "undefined"),
        ("{{ raise_exception('only user and assistant') }}", "only user and assistant"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("x" * ((1 << 20) + 1), "characters"),
    ],
)
def test_errors_say_what_is_wrong(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render(CHAT)


def test_huge_results_are_refused_before_they_are_made() -> None:
    """With memory for what templates may make, and not for what these would."""
    code = (
        "import resource; from edgellm import TemplateError\n"
        "from edgellm.text.template import ChatTemplate\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "for source in ('{{ \"%9999999999d\"|format(1) }}',\n"
        "    '{{ range(99999)|list|join(\"a\"*99999)|length }}',\n"
        '    \'{{ ("a"*1000000).replace("a", "b"*1000000)|length }}\'):\n'
        "    try: ChatTemplate(source).render([])\n"
        "    except TemplateError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.count("made more than 16777216 characters") == 3, found


def test_renderings_in_other_threads_do_not_prolong_a_deadline() -> None:
    loop = "{% if messages %}{% for i in range(10**5) %}{% for j in range(10**5) %}"
    template = ChatTemplate(f"{loop}{{% endfor %}}{{% endfor %}}{{% endif %}}", time_limit_s=0.5)
    ended: list[float] = []

    def render_for_ever() -> None:
        with pytest.raises(TemplateError, match="too long"):
            template.render(CHAT)
        ended.append(time.monotonic())

    began = time.monotonic()
    thread = threading.Thread(target=render_for_ever, daemon=True)
    thread.start()
    while not ended and time.monotonic() - began < 10:
        template.render([])
    thread.join(timeout=10)
    assert ended
    assert ended[0] - began < 5
