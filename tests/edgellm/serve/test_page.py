"""The chat page, in a headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from requirements import unavailable
from serving import Running
from stepping import held
from waiting import until

needs_chromium = pytest.mark.usefixtures("chromium")


@pytest.fixture(scope="session")
def chromium() -> None:
    if CHROMIUM is None:
        unavailable("chromium", "no chromium (apt-get install chromium)")


def test_the_policy_lets_nothing_else_in(server: Running) -> None:
    first, second = (server.get("/", headers={"Accept": "text/html,*/*"}) for _ in range(2))
    policy = first.headers["content-security-policy"]
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert first.text.count(f'nonce="{nonce}"') == 2
    assert nonce not in second.text
    assert first.headers["x-frame-options"] == "DENY"
    assert first.headers["x-content-type-options"] == "nosniff"
    assert "innerHTML" not in first.text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", first.text) == []
    with server.client() as client:
        head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")


@pytest.fixture
def tab(server: Running, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as tab:
        tab.open(server.url)
        tab.until("$('model').value")
        yield tab


def ask(tab: Browser, text: str) -> None:
    tab.type("#text", text)
    tab.click("#send")


def content(tab: Browser) -> str:
    tab.until("!running && document.querySelector('.answer .meta')")
    text: str = tab.evaluate("current.messages.at(-1).content")
    return text


@pytest.mark.slow
@needs_chromium
def test_a_question_and_its_answer(server: Running, tab: Browser, tmp_path: Path) -> None:
    tab.evaluate("change({ seed: 7, temperature: 0.8, max_tokens: 12, system: 'Be brief.' })")
    chat = server.llm.chat(system="Be brief.", seed=7, temperature=0.8, max_tokens=12)
    expected = chat.send("hello there")
    ask(tab, "hello there")
    assert content(tab) == expected.text
    shown = tab.evaluate("document.querySelector('.meta').textContent")
    assert f"{len(expected.tokens)} tokens" in shown
    assert re.search(r"\d tokens/s.*first after \d.*prompt tokens cached.*on native", shown)
    tab.click("#again")
    assert content(tab) == expected.text
    assert tab.evaluate("current.messages.length") == 2
    ask(tab, "and now")
    content(tab)
    assert tab.evaluate("current.messages.length") == 4

    tab.open(server.url)  # it is kept
    tab.until("$('model').value")
    assert tab.evaluate("conversations[0].title") == "hello there"
    assert tab.evaluate("document.querySelectorAll('.answer').length") == 2
    assert tab.complaints == []


LONG_ANSWER = """\
Here is **code**:

```python
def pairs(text: str) -> Iterator[tuple[str, str]]:  # a line that is longer than any window is wide
    for line in text.splitlines():
        yield line.partition("=")[::2]
```

| a line | what it gives |
|---|--:|
| `a=1` | a pair |
"""
FACTS = ["312 tokens", "48.1 tokens/s", "first after 0.21 s", "on native"]
SHOWN = [
    {"role": "user", "content": "Write a parser " * 9},
    {"role": "assistant", "content": LONG_ANSWER, "reasoning": "", "facts": FACTS},
    {"role": "user", "content": "Go on"},
    {"role": "assistant", "content": "It was", "reasoning": "Well", "stopped": True},
    {"role": "user", "content": "Go on"},
    {"role": "assistant", "content": "", "reasoning": "", "error": "the prompt is too long"},
]


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width"), [("desk", 1280), ("phone", 390)])
def test_what_it_looks_like(
    server: Running, tab: Browser, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    """A picture that is not blank and as wide as its window, on which all can be read."""
    kept = json.dumps([{"id": "1", "title": "A parser", "messages": SHOWN}])
    tab.evaluate(f"localStorage.setItem('edgellm.conversations', {json.dumps(kept)})")
    tab.look(width, 800, scheme=scheme, mobile=name == "phone")
    tab.open(server.url)
    tab.until("$('model').value")
    picture = tab.screenshot(tmp_path / f"{name}-{scheme}.png")
    assert len(picture) > 15_000  # one colour alone takes 3 KB
    assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    text = tab.evaluate("$('log').innerText")
    for part in ("def pairs(text", "what it gives", "stopped", "he prompt is too long", *FACTS):
        assert part in text
    seen = """[...document.querySelectorAll(".answer .bad, .block .bar, td, #send")].filter((e) => {
        e.scrollIntoView({ block: "center" });
        const { top, bottom, left, right, width } = e.getBoundingClientRect();
        return width && top >= 0 && bottom <= innerHeight && left >= 0 && right <= innerWidth;
    }).length"""
    assert tab.evaluate(seen) == 5
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", back)[:3])) > 3 * 128
    assert light == (scheme == "light")
    asked = "performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"
    assert set(tab.evaluate(asked)) == {server.url}
    assert tab.complaints == []


@pytest.mark.slow
@needs_chromium
def test_stop(server: Running, tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = server.llm.chat(seed=1, max_tokens=400).send("go on").text
    with held(server.llm, monkeypatch) as turnstile:
        ask(tab, "go on")
        (asked,) = turnstile.take_in(1)
        while not tab.evaluate("Boolean(current.messages.at(-1)?.content)"):
            turnstile.step()
        tab.click("#stop")
        until(lambda: asked.withdrawn)
    text = content(tab)
    assert text
    assert whole.startswith(text)
    assert len(text) < len(whole)
    assert tab.evaluate("current.messages.at(-1).stopped")
    assert "stopped" in tab.evaluate("document.querySelector('.meta').textContent")
    ask(tab, "again")
    assert tab.evaluate("Boolean(running) || current.messages.length === 4")
    tab.until("!running")


@pytest.mark.slow
@needs_chromium
def test_a_key_is_asked_for(serving: Callable[..., Running], tmp_path: Path) -> None:
    server = serving(api_keys=("secret",))
    with browser(tmp_path / "profile") as tab:
        tab.open(server.url)
        tab.until("$('key-dialog').open")
        tab.type("#key", "wrong")
        tab.click("#key-dialog .main")
        tab.until("$('key-dialog').open")
        tab.evaluate("$('key').value = ''")
        tab.type("#key", "secret")
        tab.click("#key-dialog .main")
        tab.until("$('model').value === 'tiny'")


MARKDOWN = {
    "a **b** *c* `d`": "<p>a <strong>b</strong> <em>c</em> <code>d</code></p>",
    "# T\ntext\nmore\n\nnext": "<h3>T</h3><p>text\nmore</p><p>next</p>",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "2. x\n3. y": '<ol start="2"><li>x</li><li>y</li></ol>',
    "```py\na <b>\n  c\n```\nz": '<div class="block"><div class="bar"><span>py</span>'
    '<button class="bare" type="button">Copy</button></div>'
    "<pre><code>a &lt;b&gt;\n  c</code></pre></div><p>z</p>",
    "```\nopen": '<div class="block"><div class="bar"><span></span>'
    '<button class="bare" type="button">Copy</button></div><pre><code>open</code></pre></div>',
    "x\n\n---\ny": "<p>x</p><hr><p>y</p>",
    "* * *": "<hr>",
    "| a | **b** |\n|---|--:|\n| 1 | `x\\|y` |\n| <i> |\nz": '<div class="table"><table><thead>'
    '<tr><th>a</th><th class="end"><strong>b</strong></th></tr></thead><tbody>'
    '<tr><td>1</td><td class="end"><code>x|y</code></td></tr>'
    '<tr><td>&lt;i&gt;</td><td class="end"></td></tr></tbody></table></div><p>z</p>',
    "a | b\nc | d": "<p>a | b\nc | d</p>",
    "a | b\n---": "<p>a | b</p><hr>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](https://e.org/a)": '<p><a href="https://e.org/a" target="_blank" '
    'rel="noopener noreferrer">x</a></p>',
    "2 * 3 * 4 and a_b_c": "<p>2 * 3 * 4 and a_b_c</p>",
    "> said": "<blockquote>said</blockquote>",
}


@pytest.mark.slow
@needs_chromium
def test_markdown(tab: Browser) -> None:
    for text, expected in MARKDOWN.items():
        shown = f"make('div', {{}}, ...markdown({json.dumps(text)})).innerHTML"
        assert tab.evaluate(shown) == expected
    assert tab.complaints == []
