"""No template runs or grows for ever: a rendering pays for its work before it does it."""

from __future__ import annotations

import contextlib
import math
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from edgellm.errors import EdgeLLMError, TemplateError
from edgellm.text.template import ChatTemplate
from edgellm.text.template_functions import FILTERS

CHAT = [{"role": "user", "content": "Hi <b> 🙂\n"}, {"role": "assistant", "content": "Hello"}]
WORK = 1 << 19
# Memory that work may stand for, at most: a small object, a list's place for it, and a copy.
BYTES_PER_WORK = 16
SPARE_BYTES = 4 << 20
# Grows to 2**60 places without taking any memory.
SHARED = (
    "{% set ns = namespace(a=['x'], b=['x'], t=('x',)) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% endfor %}"
)


def peak_of(call: Callable[[], object]) -> int:
    """Bytes of Python's memory that a call takes at most, beyond those before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        # loops
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% set c = 1 %}{% endfor %}{% endfor %}",
        "{% for i in range(10**9) %}{% if loop.length %}{% endif %}{% endfor %}",
        "{% for i in range(10**5) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(10**9) if i < 0 %}{% endfor %}",
        "{{ range(10**9) | select('ge', 10**9) | list }}",
        "{{ range(10**9) | map('string') | first }}" * 99 + "{{ range(10**9) | list }}",
        "{{ range(*range(10**9)) }}",
        "{{ -1 in range(10**9) }}{{ 0.5 in range(10**9) }}",
        "{% macro f() %}{% for i in range(10**9) %}x{% endfor %}{% endmacro %}{{ f() | length }}",
        # growing texts and lists
        "{{ 'A' * 10**9 }}",
        "{{ ([1] * 1000000) * 1000000 }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x~n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x=n.x+n.x %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x=n.x+[i] %}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(10**9) %}{% set n.x=[n.x] %}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(10**9) %}{% set n.x=namespace(x=n.x) %}"
        "{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(99) %}"
        "{% set n.x = n.x + ['x' * 100000] %}{% endfor %}",
        "{% set x = range(99999) | list %}{% set n = namespace(x=[]) %}{% for i in range(99) %}"
        "{% set n.x = [n.x, x[1:]] %}{% endfor %}",
        # formats
        "{{ '%1000000000d' % 5 }}",
        "{{ '%1000000000d' is odd }}",
        "{{ '{:1000000000d}'.format(5) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ ['%9999999999d'] | format(1) }}",
        "{{ '%(a)9999999999d' % {'a': 1} }}",
        "{{ '%(a)9999999999d' | format(a=1) }}",
        "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
        "{{ '%s' % [[['x' * 100000] * 1000]] }}",
        "{{ ('{0:f}' * 100000).format(1e308) }}",
        "{{ ('{0:b}' * 1000).format(('f' * 100000) | int(base=16)) }}",
        "{{ ('%*d' * 1000) | format(1000000, 1) }}",
        "{{ ('{0:{1}}' * 1000).format(5, 1000000) }}",
        "{{ strftime_now('%c' * 100000) }}",
        # filters and methods
        "{{ range(9999) | list | join('a' * 9999) | length }}",
        "{{ ('a' * 9999).join(range(9999) | map('string')) | length }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) | length }}",
        "{{ ('a' * 1000).replace('', 'b' * 100000) | length }}",
        "{{ ('\\n' * 20000) | indent(1000000, true, true) | length }}",
        "{{ 'x' | indent(10**9) }}",
        "{{ range(20000) | list | tojson(indent=1000000) }}",
        "{{ range(20000) | list | tojson(separators=('x' * 1000000, ':')) }}",
        "{{ ('🙂' * 100000) | tojson(ensure_ascii=true) }}",
        "{{ (['🙂' * 100000]) }}",
        "{{ ('\"' * 100000) | e }}",
        "{{ ('\"' * 100000) + ('x' | safe) }}",
        "{{ ('a ' * 100000).split() | length }}",
        "{{ ('a' * 100000).rsplit('b' + 'a' * 50000) }}",
        "{{ ('a' * 100000).strip('b' * 50000 + 'a') }}",
        "{{ ('a' * 100000) | list | length }}",
        "{{ [{}] | map(attribute='a.' * 100000) | list }}",
        "{{ [1] | join(',', attribute='a.' * 100000) }}",
        "{{ range(1000) | sort(attribute='a,' * 1000) }}",
        # what is in many places
        SHARED + "{{ ns.a }}",
        SHARED + "{{ ns.a ~ '' }}",
        SHARED + "{{ ns.a | tojson }}",
        SHARED + "{{ ns.a | string }}",
        SHARED + "{{ '%s' % (ns.a,) }}",
        SHARED + "{{ '{}'.format(ns.a) }}",
        SHARED + "{{ ns.a == ns.b }}",
        SHARED + "{{ [ns.a] | select('eq', ns.b) | list }}",
        SHARED + "{{ ns.a in [ns.b] }}",
        SHARED + "{{ [ns.a, ns.b] | sort }}",
        SHARED + "{{ [ns.t] | unique | list }}",
        SHARED + "{{ {'a': ns.a, 'b': ns.b} | dictsort(by='value') }}",
        SHARED + "{{ raise_exception(ns.a) }}",
    ],
)
def test_work_is_refused_before_it_is_done(source: str) -> None:
    template = ChatTemplate(source, work_limit=WORK, time_limit_s=math.inf)

    def render() -> None:
        with pytest.raises(TemplateError, match="stopped"):
            template.render(CHAT)

    assert peak_of(render) < WORK * BYTES_PER_WORK + SPARE_BYTES


@pytest.mark.parametrize(
    "source",
    [
        "{{ {ns.t: 1} }}",
        "{{ {}[ns.t] }}",
        "{{ {}.get(ns.t) }}",
        "{{ ns.t in {} }}",
        "{{ [ns.t] - {}.keys() }}",
        "{{ [1] | map(ns.t) | list }}",
        "{{ [1] | select(ns.t) | list }}",
        "{{ [{}] | map(attribute=ns.t) | list }}",
        "{{ namespace([(ns.t, 1)]) }}",
        "{{ dict([(ns.t, 1)]) }}",
    ],
)
def test_nothing_that_takes_for_ever_to_hash_is_a_key(source: str) -> None:
    with pytest.raises(TemplateError, match="TypeError"):
        ChatTemplate(SHARED + source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10**10**1000 }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x=n.x*n.x %}{% endfor %}",
        f"{{{{ 0x{'f' * 3000} // 3 }}}}",
        "{{ ('f' * 300000) | int(base=16) - 1 }}",
    ],
)
def test_numbers_have_a_thousand_bits(source: str) -> None:
    with pytest.raises(TemplateError, match="more than 1024 bits"):
        ChatTemplate(source).render(CHAT)


def test_the_time_is_looked_at_in_each_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(per_call=0.01)
    monkeypatch.setattr("edgellm.text.template_budget.time", clock)
    for loop in (
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ range(10**9) | select('ge', 10**9) | list }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        SHARED + "{{ ns.a == ns.b }}",
    ):
        began = clock.now
        with pytest.raises(TemplateError, match="too long"):
            ChatTemplate(loop, time_limit_s=1.0).render(CHAT)
        assert clock.now - began < 1.1


def test_renderings_in_other_threads_have_budgets_of_their_own() -> None:
    inner = ChatTemplate("{{ 'x' * 400000 }}", work_limit=1_000_000)
    rendered: list[str] = []

    class Other(dict[str, Any]):
        def __missing__(self, key: str) -> str:
            thread = threading.Thread(target=lambda: rendered.append(inner.render([])))
            thread.start()
            thread.join()
            return "yes"

    template = ChatTemplate("{{ 'x' * 400000 }}{{ messages[0].other.rendered }}", work_limit=10**6)
    assert template.render([{"other": Other()}]).endswith("yes")
    assert len(rendered[0]) == 400_000


def test_probes_share_one_budget() -> None:
    source = "{{ 'x' * 300000 }}{{ messages[-1].content }}"
    template = ChatTemplate(source, work_limit=1_000_000)
    assert template.render(CHAT).endswith("Hello")
    assert template.answer_format.calls is None
    assert "does not render" in template.answer_format.no_calls


def test_a_long_chat_is_far_from_the_limits() -> None:
    """A million tokens, in a template that looks at each content five times."""
    source = (
        "{% for m in messages %}{% if '</think>' in m.content %}{% endif %}<|im_start|>\n"
        "{{ m.content.split('</think>')[-1].strip('\\n') | trim }}<|im_end|>\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 800} for _ in range(1000)]
    assert ChatTemplate(source, time_limit_s=math.inf).render(messages).count("word") == 800_000


@pytest.mark.parametrize(
    "source",
    [
        # calls without an end, an object with many brackets before the name, a quadratic text
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "(edgekey1='edgevalue1', edgekey2='edgevalue2'</call>{% endfor %}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{'a': '{{ '[' * 20000 }}'"
        '{"a":{{ \'{"a":\' * 3000 }}{{ \'[\' * 9000 }}"{{ c.function.name }}"{{ c.function'
        ".arguments | tojson }}{% endfor %}",
        "{{ m.content }}{{ (m,) * 3000 }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<a>' * 3000 }}{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}{% endfor %}",
    ],
)
def test_renderings_that_are_no_format(source: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{source}{{% endfor %}}")
    assert template.answer_format.calls is None
    assert template.answer_format.no_calls


# ---- random templates

ATOMS = (
    *("messages", "messages[0].content", "m", "tools", "ns", "ns.a", "ns.b", "i", "loop", "f"),
    *("loop.length", "missing", "none", "true", "7", "-1", "1e308", "10**9", "range(100000)"),
    *("''", "'x'", "'🙂<\\n'", "'%9999d'", "'{0:99}{}'", "'a.b'", "('x' | safe)"),
)
OPERATORS = (
    *("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">="),
    *(" in ", " not in ", " and ", " or "),
)
METHODS = (
    *("split", "rsplit", "strip", "replace", "join", "format", "upper", "title", "zfill"),
    *("encode", "get", "items", "keys"),
)
FUNCTIONS = ("f", "range", "namespace", "dict", "strftime_now", "raise_exception", "lipsum")
CALLS = (
    "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</c>{% endfor %}"
)


def written(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """`form` with parts in the places of `@`."""
    return st.tuples(*parts).map(lambda drawn: form.replace("@", "{}").format(*drawn))


def one_of(words: Iterable[str]) -> st.SearchStrategy[str]:
    return st.sampled_from([*words])


EXPRESSIONS = st.recursive(
    one_of(ATOMS),
    lambda inner: st.one_of(
        written("(@@@)", inner, one_of(OPERATORS), inner),
        written("(@ | @)", inner, one_of([*FILTERS, "pprint", "wordwrap"])),
        written("(@ | @(@))", inner, one_of(FILTERS), inner),
        written("(@ | @(@, @))", inner, one_of(FILTERS), inner, inner),
        written("@.@(@)", inner, one_of(METHODS), inner),
        written("@(@)", one_of(FUNCTIONS), inner),
        written("[@, @]", inner, inner),
        written("(@, @)", inner, inner),
        written("{{@: @}}", inner, inner),
        written("@[@]", inner, inner),
        written("@[@:@]", inner, inner, inner),
        written("(@ is @)", inner, one_of(["string", "odd", "defined", "x"])),
        written("(@ if @ else @)", inner, inner, inner),
    ),
    max_leaves=6,
)
STATEMENTS = st.recursive(
    st.one_of(
        written("{{{{ @ }}}}", EXPRESSIONS),
        written("{{% set ns.a = @ %}}", EXPRESSIONS),
        written("{{% set ns.b = [ns.a, ns.b, @] %}}", EXPRESSIONS),
        one_of(["text <call>", "{{ m.content }}", "{% break %}", "\ue0e0", "{{ m.role }}", CALLS]),
        one_of(["{% set ns.a = ns.a ~ ns.a %}", "{% set ns.a = ns.a + ns.a %}"]),
    ),
    lambda inner: st.one_of(
        written("@@", inner, inner),
        written("{{% for i in @ %}}@{{% endfor %}}", EXPRESSIONS, inner),
        written("{{% if @ %}}@{{% else %}}@{{% endif %}}", EXPRESSIONS, inner, inner),
        written("{{% macro f(i) %}}@{{% endmacro %}}@", inner, inner),
        written("{{% for m in messages %}}@{{% endfor %}}", inner),
        written("{{% filter upper %}}@{{% endfilter %}}", inner),
        written("{{% set ns.b %}}@{{% endset %}}", inner),
    ),
    max_leaves=6,
)


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Templates, of which some have lost or doubled a part."""
    source = "{% set ns = namespace(a='x', b=[]) %}" + draw(STATEMENTS)
    if draw(st.booleans()):
        return source
    begin, end = sorted(draw(st.tuples(*[st.integers(0, len(source))] * 2)))
    return source[:begin] + draw(st.sampled_from(["", source[begin:end] * 2])) + source[end:]


FUZZ_WORK = 1 << 16


@given(sources())
def test_any_template_renders_or_is_refused(source: str) -> None:
    try:
        template = ChatTemplate(source, work_limit=FUZZ_WORK, time_limit_s=math.inf)
    except TemplateError:
        return

    def render() -> None:
        with contextlib.suppress(EdgeLLMError):
            assert isinstance(template.render(CHAT, tools=[{"function": {}}]), str)

    assert peak_of(render) < FUZZ_WORK * BYTES_PER_WORK + SPARE_BYTES
    assert template.answer_format is not None
