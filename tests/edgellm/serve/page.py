"""The chat page in a browser: what a user does in it, and answers that come when a test says so."""

from __future__ import annotations

import json

from browser import Browser
from serving import Running


def ask(tab: Browser, text: str) -> None:
    tab.type("#text", text)
    tab.click("#send")


def content(tab: Browser) -> str:
    tab.until("!running.size && document.querySelector('.answer .meta')")
    text: str = tab.evaluate("current.messages.at(-1).content")
    return text


def shown(tab: Browser) -> str:
    text: str = tab.evaluate("$('log').innerText")
    return text


def said(tab: Browser) -> list[str]:
    texts: list[str] = tab.evaluate("current.messages.map(({ content }) => content)")
    return texts


def reopen(tab: Browser, server: Running) -> None:
    tab.evaluate("window.before = true")
    tab.command("Page.reload")
    tab.until("!window.before && document.readyState === 'complete' && $('model').value")


# Has the page ask this instead of the server, whose answers come when a test says so.
STAND_IN = """
window.asked = [];
window.fetch = async (path, { body, signal }) => {
    if (!body) return new Response(JSON.stringify({ data: models }));
    if (window.refused) throw new TypeError("Failed to fetch");
    const stream = new ReadableStream({ start(control) {
        asked.push({ path, body: JSON.parse(body), signal, control });
        signal.addEventListener("abort", () => control.error(signal.reason));
    } });
    return new Response(stream);
};
0"""


class Answers:
    """The answers that a page waits for, in the order in which it has asked for them."""

    def __init__(self, tab: Browser) -> None:
        self._tab = tab
        tab.evaluate(STAND_IN)

    def asked(self, count: int) -> list[dict[str, str]]:
        """Wait for so many, and give the messages of the last one."""
        self._tab.until(f"asked.length === {count}")
        messages: list[dict[str, str]] = self._tab.evaluate("asked.at(-1).body.messages")
        return messages

    def say(self, at: int, text: str, *, reason: str | None = None) -> None:
        """Let one go on, or end for a reason."""
        choice = {"delta": {"content": text}, "finish_reason": reason}
        frame = json.dumps(f"data: {json.dumps({'choices': [choice]})}\n\n")
        self._tab.evaluate(f"asked[{at}].control.enqueue(new TextEncoder().encode({frame}))")
        if reason is not None:
            self._tab.evaluate(f"asked[{at}].control.close()")
