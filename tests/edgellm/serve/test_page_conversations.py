"""Conversations of the chat page, in a headless Chromium: kept, edited, branched, exported."""

from __future__ import annotations

import json

import pytest
from browser import Browser
from page import Answers, ask, reopen, said, shown
from serving import Running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]


def test_an_answer_is_kept_as_it_comes(server: Running, tab: Browser) -> None:
    answers = Answers(tab)
    ask(tab, "a story")
    answers.asked(1)
    answers.say(0, "Once upon")
    tab.until("current.messages.at(-1).content")
    reopen(tab, server)
    assert said(tab) == ["a story", "Once upon"]
    assert "stopped" in shown(tab)
    answers = Answers(tab)
    tab.click("#more")
    assert [each["role"] for each in answers.asked(1)] == ["user", "assistant"]
    answers.say(0, " a time", reason="stop")
    tab.until("!running.size")
    assert said(tab) == ["a story", "Once upon a time"]
    assert "stopped" not in shown(tab)
    assert not tab.evaluate("Boolean($('more'))")


def test_a_question_without_an_answer(server: Running, tab: Browser) -> None:
    """It can be asked again, and is no turn of its own."""
    answers = Answers(tab)
    ask(tab, "one")
    answers.asked(1)
    reopen(tab, server)
    assert tab.evaluate("[Boolean($('again')), Boolean($('more'))]") == [True, False]
    answers = Answers(tab)
    tab.click("#again")
    assert answers.asked(1) == [{"role": "user", "content": "one"}]
    reopen(tab, server)
    answers = Answers(tab)
    ask(tab, "two")
    assert answers.asked(1) == [{"role": "user", "content": "one\n\ntwo"}]
    tab.click("#stop")
    tab.until("!running.size")
    assert tab.evaluate("$('text').value") == "two"
    assert said(tab) == ["one", ""]


def test_answers_go_on_in_other_conversations(tab: Browser) -> None:
    answers = Answers(tab)
    ask(tab, "first")
    answers.asked(1)
    tab.click("#new")
    ask(tab, "second")
    answers.asked(2)
    answers.say(0, "One")
    answers.say(1, "Two", reason="stop")
    tab.until("running.size === 1")
    assert said(tab) == ["second", "Two"]
    assert tab.evaluate("[$('send').hidden, $('stop').hidden]") == [False, True]
    assert tab.evaluate("$('list').innerText").split("\n")[::3] == ["second", "first …"]
    tab.evaluate("go(conversations[1])")
    assert tab.evaluate("[$('send').hidden, $('stop').hidden]") == [True, False]
    answers.say(0, " and a half", reason="stop")
    tab.until("!running.size")
    assert "One and a half" in shown(tab)
    assert tab.complaints == []


def test_messages_are_edited_and_deleted(tab: Browser) -> None:
    turns = [
        {"role": role, "content": f"{role}{i}"} for i in "12" for role in ("user", "assistant")
    ]
    texts = [each["content"] for each in turns]
    tab.evaluate(f"current.messages = {json.dumps(turns)}; keep(current); go(current)")
    answers = Answers(tab)
    tab.type("#text", "a draft")
    tab.click(".user:nth-of-type(3) .tools button")
    assert tab.evaluate("$('text').value") == "user2"
    tab.click(".edited .tools button")
    assert tab.evaluate("$('text').value") == "a draft"
    tab.click(".user .tools button")
    tab.evaluate("window.refused = true; $('text').value = 'other'")
    tab.click("#send")
    tab.until("!running.size && current.error")
    assert said(tab) == texts  # nothing is lost where the server does not answer
    assert "The server does not answer." in shown(tab)
    tab.evaluate("window.refused = false; $('text').value = ''")
    tab.click(".user .tools button")
    tab.evaluate("$('text').value = 'other'")
    tab.click("#send")
    assert answers.asked(1) == [{"role": "user", "content": "other"}]
    answers.say(0, "answer", reason="stop")
    tab.until("!running.size")
    assert said(tab) == ["other", "answer"]
    tab.click(".user .tools button:last-child")
    assert said(tab) == []


def test_what_another_tab_keeps_is_not_lost(tab: Browser) -> None:
    answers = Answers(tab)
    ask(tab, "here")
    answers.asked(1)
    other = {"id": "other", "title": "there", "messages": [{"role": "user", "content": "there"}]}
    tab.evaluate(
        f"""const kept = [{json.dumps(other)}, ...store.get("conversations")];
        localStorage.setItem("edgellm.conversations", JSON.stringify(kept));
        dispatchEvent(new StorageEvent("storage", {{ key: "edgellm.conversations" }}))"""
    )
    answers.say(0, "an answer", reason="stop")
    tab.until("!running.size")
    kept = tab.evaluate("store.get('conversations').map(({ messages }) => messages.at(-1).content)")
    assert kept == ["there", "an answer"]
    assert said(tab) == ["here", "an answer"]
    tab.evaluate(
        """const other = store.get("conversations").map((each) => ({ ...each, title: "new" }));
        localStorage.setItem("edgellm.conversations", JSON.stringify(other));
        dispatchEvent(new StorageEvent("storage", { key: "edgellm.conversations" }))"""
    )
    assert tab.evaluate("current.title") == "new"
    tab.click(".answer .meta button:nth-of-type(2)")  # a branch from what was drawn before
    assert said(tab) == ["here", "an answer"]


ANSWER = {"reasoning": "", "stopped": False, "cut": False}


TURNS = [
    {"role": role, "content": f"{role}{i}", **(ANSWER if role == "assistant" else {})}
    for i in "12"
    for role in ("user", "assistant")
]


def test_branches_names_and_files(server: Running, tab: Browser) -> None:
    tab.evaluate(f"current.messages = {json.dumps(TURNS)}; keep(current); go(current)")
    tab.evaluate("window.prompt = () => ' a name '; window.alert = (text) => window.alerted = text")
    tab.click("#list [aria-label=Rename]")
    tab.click(".answer .meta button:nth-of-type(2)")
    assert said(tab) == ["user1", "assistant1"]
    assert tab.evaluate("conversations.map(({ messages }) => messages.length)") == [2, 4]
    answers = Answers(tab)
    ask(tab, "other")
    answers.asked(1)
    answers.say(0, "way", reason="stop")
    tab.until("!running.size")
    assert tab.evaluate("conversations.map(({ title }) => title)") == ["a name", "a name"]
    assert tab.evaluate("conversations[1].messages.length") == 4

    exported = """new Promise((done) => {
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then(done); return make(blob); };
        $("export").click();
    })"""
    reply = tab.command("Runtime.evaluate", expression=exported, awaitPromise=True)
    text = reply["result"]["value"]
    kept = tab.evaluate("conversations")
    assert json.loads(text) == kept
    tab.evaluate("conversations = conversations.slice(0, 1)")
    for wrong in ("no json", '{"a": 1}', '[{"id": 1}]', text.replace('"user"', '"system"')):
        tab.evaluate(f"window.alerted = 0; importFrom(new File([{json.dumps(wrong)}], 'f.json'))")
        tab.until(
            "window.alerted === 'f.json holds no exported conversations; nothing was imported.'"
        )
    assert tab.evaluate("conversations.length") == 1
    tab.evaluate(f"importFrom(new File([{json.dumps(text)}], 'f.json'))")
    tab.until("conversations.length === 2")
    contents = "messages.map(({ content }) => content)"
    shown = f"conversations.map(({{ id, title, messages }}) => [id, title, {contents}])"
    assert tab.evaluate(shown) == [
        [each["id"], each["title"], [said["content"] for said in each["messages"]]] for each in kept
    ]
    odd = [{**kept[0], "id": "3", "messages": [{**kept[0]["messages"][1], "facts": 5, "x": 1}]}]
    tab.evaluate(f"importFrom(new File([{json.dumps(json.dumps(odd))}], 'f.json'))")
    tab.until("conversations.length === 3")
    assert "x" not in tab.evaluate("conversations[2].messages[0]")
    tab.evaluate("go(conversations[2])")
    many = json.dumps([{"id": f"m{i}", "title": "", "messages": []} for i in range(98)])
    tab.evaluate(f"window.alerted = 0; importFrom(new File([{json.dumps(many)}], 'f.json'))")
    tab.until("String(window.alerted).startsWith('There is no room for 98')")
    assert tab.evaluate("conversations.length") == 3
