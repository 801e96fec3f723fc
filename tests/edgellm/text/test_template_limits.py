"""No template runs or grows for ever: a rendering pays for its work before it does it."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import Clock

from edgellm.errors import EdgeLLMError, TemplateError
from edgellm.text.template import ChatTemplate

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
    ],
)
def test_no_loop_goes_on_for_ever(source: str) -> None:
    assert_refused(source, WORK // 8)


@pytest.mark.parametrize(
    "source",
    [
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
    ],
)
def test_work_is_refused_before_it_is_done(source: str) -> None:
    assert_refused(source, WORK)


@pytest.mark.parametrize(
    "expression",
    [
        "ns.a",
        "ns.a ~ ''",
        "ns.a | tojson",
        "ns.a | string",
        "'%s' % (ns.a,)",
        "'{}'.format(ns.a)",
        "ns.a == ns.b",
        "{'a': ns.a}.items() == {'a': ns.b}.items()",
        "[ns.a] | select('eq', ns.b) | list",
        "ns.a in [ns.b]",
        "[ns.a, ns.b] | sort",
        "[ns.t] | unique | list",
        "{'a': ns.a, 'b': ns.b} | dictsort(by='value')",
        "raise_exception(ns.a)",
    ],
)
def test_what_is_in_many_places_is_counted_in_each(expression: str) -> None:
    assert_refused(f"{SHARED}{{{{ {expression} }}}}", WORK // 8)


def assert_refused(source: str, work: int) -> None:
    template = ChatTemplate(source, work_limit=work, time_limit_s=math.inf)

    def render() -> None:
        with pytest.raises(TemplateError, match="stopped"):
            template.render(CHAT)

    assert peak_of(render) < work * BYTES_PER_WORK + SPARE_BYTES


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

CALLS = (
    "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</c>{% endfor %}"
)
# Forms of expressions, with T, L, N, A in the places of texts, lists, numbers and anything.
FORMS = {
    "T": """'x' ; ns.t ; '🙂<\\n' ; ns.t ; m.content ; (T ~ T) ; (T + T) ; (T * N) ; T[N:] ; T[::-1]
        ; T.replace(T, T) ; (T | replace('', T)) ; T.strip(T) ; (T | upper) ; (T | e) ; (T | safe)
        ; (L | join(T)) ; T.join(L | map('string')) ; (A | string) ; (A | tojson(indent=N))
        ; (A | tojson) ; ('%s%99d' % (T, N)) ; '{}{:99}'.format(A, N) ; ('%s' | format(A))
        ; (T | indent(N, true)) ; (T if A else T) ; f(A) ; strftime_now(T)""",
    "L": """ns.l ; messages ; ns.l ; range(N) ; (range(N) | list) ; [A, A] ; (A, A) ; (L + L)
        ; (L * N) ; L[N:] ; T.split(T) ; (T | list) ; (L | map('string') | list)
        ; (L | select('ne', A) | list) ; (L | sort) ; (L | unique | list) ; (L | reverse | list)
        ; {'a': A, 'b': A} ; ({'a': A, T: A} | dictsort) ; ({'a': A} | items | list)""",
    "N": """7 ; 99 ; -1 ; 100000 ; 10**9 ; i ; (T | length) ; (L | length) ; (N + N) ; (N * N)
        ; (N ** N) ; (N - N) ; (N // N) ; (T | int) ; (T | int(base=16)) ; 1e308""",
    "A": """T ; L ; T ; L ; N ; ns ; none ; missing ; (A == A) ; (A in L) ; (T in T) ; (A < A < A)
        ; (A and A) ; (L | first) ; {}.get(A) ; {A: A} ; L[A] ; T.encode() ; (N is odd) ; dict(A)
        ; namespace(a=A) ; raise_exception(A) ; f ; (A | max) ; loop""",
    "S": """text ; {{ ns.t }} ; {{ A }} ; {{ T }} ; {{ L }} ; {% set ns.t = T %}
        ; {% set ns.l = L %} ; {% set ns.t = T %} ; {% set ns.l = L %}
        ; {% set ns.l = [ns.l, ns.l] %} ; S S ; S S ; S S
        ; {% set ns.t = ns.t ~ ns.t %} ; {% set ns.t = ns.t + T %} ; {% set ns.l = ns.l + L %}
        ; {% set ns.t = ns.t * 2 %} ; {% for i in L %} S {% endfor %} ; LOOP ; LOOP ; LOOP
        ; {% for i in L %} S {% break %} {% endfor %} ; {% for m in messages %} S {% endfor %}
        ; {% if A %} S {% else %} S {% endif %} ; {% macro f(i) %} S {% endmacro %} ; CALLS
        ; {% filter upper %} S {% endfilter %} ; {% set t %} S {% endset %} ; \ue0e0""",
}
WHOLE = {"LOOP": "{% for i in range(99999) %} S {% endfor %}", "CALLS": CALLS}
CHOICES = {kind: re.split(r"\s+; ", forms) for kind, forms in FORMS.items()}


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Templates that make sense, of which some have lost or doubled a part."""

    def expanded(kind: str, depth: int) -> str:
        choices = CHOICES[kind]
        form = draw(st.sampled_from(choices if depth else choices[:2]))
        form = WHOLE.get(form, form)
        return re.sub(r"\b[TLNAS]\b", lambda m: expanded(m[0], max(0, depth - 1)), form)

    source = "{% set ns, m = namespace(t='x', l=[1]), messages[0] %}" + expanded("S", 6)
    if draw(st.integers(0, 3)):
        return source
    begin, end = sorted(draw(st.tuples(*[st.integers(0, len(source))] * 2)))
    return source[:begin] + draw(st.sampled_from(["", source[begin:end] * 2])) + source[end:]


FUZZ_WORK = 1 << 16


@pytest.mark.slow
@settings(max_examples=100)
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
