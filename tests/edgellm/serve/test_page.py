"""The chat page, in a headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Browser, browser
from page import Answers, ask, content, said, shown
from serving import Running
from stepping import held
from waiting import until

needs_chromium = pytest.mark.usefixtures("chromium")


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
    assert re.findall(r"https?://(?!www\.w3\.org/(?:2000/svg|1998/Math))", first.text) == []
    with server.client() as client:
        head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")


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
    assert tab.evaluate("running.size > 0 || current.messages.length === 4")
    tab.until("!running.size")


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


@pytest.mark.slow
@needs_chromium
def test_a_message_that_is_too_long_comes_back(tab: Browser) -> None:
    text = "much " * 600
    ask(tab, text)
    tab.until("!running.size && current.error")
    assert "he prompt is too long" in shown(tab)
    assert tab.evaluate("$('text').value") == text.strip()
    assert said(tab) == []
    tab.evaluate("$('text').value = ''")
    tab.evaluate("change({ max_tokens: 2 })")
    ask(tab, "hi")
    content(tab)
    assert said(tab)[0] == "hi"
    assert "too long" not in shown(tab)
    answered = said(tab)
    tab.type("#text", "typed meanwhile")
    long = "[...current.messages, { role: 'user', content: 'x'.repeat(3000) }]"
    tab.evaluate(f"answer(current, {long}, 'sent')")
    tab.until("!running.size && current.error")
    assert said(tab) == answered
    assert tab.evaluate("$('text').value") == "sent\n\ntyped meanwhile"


@pytest.mark.slow
@needs_chromium
def test_an_answer_that_is_cut_off_says_so_and_goes_on(server: Running, tab: Browser) -> None:
    tab.evaluate("change({ temperature: 0, max_tokens: 5 })")
    options = {"temperature": 0, "max_tokens": 10}
    whole = server.llm.chat(**options).send("hello there")
    assert whole.finish_reason == "length"
    ask(tab, "hello there")
    assert whole.text.startswith(content(tab))
    assert "cut off" in shown(tab)
    tab.click("#more")
    assert content(tab) == whole.text


@pytest.mark.slow
@needs_chromium
def test_copies_without_a_clipboard(tab: Browser) -> None:
    """Which pages over http have only on the machine itself."""
    message = {"role": "assistant", "content": "the text", "reasoning": ""}
    tab.evaluate(f"current.messages = [{json.dumps(message)}]; showLog()")
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined }); 0")
    copied = """new Promise((done) => {
        document.addEventListener("copy", ({ target }) => done(target.value), { once: true });
        document.querySelector(".answer .meta button").click();
    })"""
    allowed = tab.command(
        "Runtime.evaluate", expression=copied, awaitPromise=True, userGesture=True
    )
    assert allowed["result"]["value"] == "the text"
    tab.until("document.querySelector('.answer .meta button').textContent === 'Copied'")
    tab.evaluate("document.execCommand = () => false; showLog()")
    tab.click(".answer .meta button")
    tab.until("document.querySelector('.answer .meta button').textContent.includes('forbids')")


@pytest.mark.slow
@needs_chromium
def test_the_context_is_measured(server: Running, tab: Browser) -> None:
    size = server.llm.engine.ctx_size
    assert tab.evaluate("$('context').innerText.trim()") == f"0 of {size} tokens"
    tab.evaluate("change({ max_tokens: 3, temperature: 0 })")
    ask(tab, "hello")
    content(tab)
    answer = server.llm.chat(max_tokens=3, temperature=0).send("hello")
    used = answer.stats.prompt_tokens + answer.stats.generation_tokens
    assert tab.evaluate("$('context').innerText.trim()") == f"{used} of {size} tokens"
    meter = "document.querySelector('meter')"
    assert tab.evaluate(f"[{meter}.value, {meter}.max]") == [used, size]


@pytest.mark.slow
@needs_chromium
def test_a_base_model_that_was_not_loaded(tab: Browser) -> None:
    """It is known for one only once it has refused to chat."""
    tab.evaluate("models = [{ id: models[0].id }]; showModel()")
    tab.evaluate(
        """window.asked = [];
        window.fetch = async (path, { body }) => {
            const base = { id: models[0].id, capabilities: { completion_chat: false } };
            if (!body) return new Response(JSON.stringify({ data: [base] }));
            asked.push(path);
            const error = { error: { message: "no chat template" } };
            if (path.includes("chat")) return new Response(JSON.stringify(error), { status: 400 });
            const choice = { choices: [{ text: " a time", finish_reason: "stop" }] };
            return new Response(`data: ${JSON.stringify(choice)}\\n\\n`);
        }; 0"""
    )
    ask(tab, "Once upon")
    assert content(tab) == " a time"
    assert tab.evaluate("asked") == ["v1/chat/completions", "v1/completions"]


@pytest.mark.slow
@needs_chromium
def test_a_base_model_continues_the_text(tab: Browser) -> None:
    tab.evaluate("models[0].capabilities.completion_chat = false; showModel()")
    assert "continues your text" in shown(tab)
    answers = Answers(tab)
    for i, text in enumerate(("Once upon", " and then")):
        ask(tab, text)
        answers.asked(i + 1)
        choice = {"choices": [{"text": f" {i}", "finish_reason": "length"}]}
        frame = json.dumps(f"data: {json.dumps(choice)}\n\n")
        tab.evaluate(f"asked[{i}].control.enqueue(new TextEncoder().encode({frame}))")
        tab.evaluate(f"asked[{i}].control.close()")
        tab.until("!running.size")
    assert tab.evaluate("asked.map(({ path, body }) => [path, body.prompt])") == [
        ["v1/completions", "Once upon"],
        ["v1/completions", "Once upon 0 and then"],
    ]
