"""The interactive chat of `edgellm run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from edgellm import LLM, Chat, Completion, GenerationArguments, Message, Session
from edgellm.cli.interrupt import INTERRUPTED, cancel_on_interrupt, exit_on_terminate
from edgellm.cli.output import ShownStats, end_shown_line, report, write
from edgellm.cli.progress import progress_bar
from edgellm.cli.prompt_input import PromptInput
from edgellm.cli.text import file_errors, say, spelled_out, without_controls
from edgellm.errors import CancelledError, ContextOverflowError, EdgeLLMError, OptionError
from edgellm.generation_options import MAY_BE_NONE
from edgellm.store.home import replacing_file

# Types of the sampling options that /set can change, besides the options that may be none.
_PLAIN = (int, float, str)
_QUOTES = '"""'
_GAP = "<gap>"
_HELP = f"""\
/help              this list
/clear             forget the conversation
/system [TEXT]     show or change the system prompt; changing it clears the conversation
/set NAME VALUE    change a sampling option, e.g. /set temperature 0 or /set context_policy shift
/show              show model, context and sampling options
/stats [on|off]    all statistics of the last answer; with on or off, behind each answer
/save FILE         save the conversation as JSON
/load FILE         load a saved conversation
/regen             answer the last message again
/rewind [N]        forget the last N questions and their answers
/fork NAME         keep the conversation as it is now under a name
/switch NAME       go on with a kept one; what it shares with this one is not computed again
/infill TEXT       fill the <gap> in TEXT, with a model that was trained for it
/exit              leave (also Ctrl-D)
{_QUOTES}                begin and end a message of several lines
Ctrl-C             stop the answer; at the prompt, drop what is typed; twice, leave"""
_HOW_TO_LEAVE = "Ctrl-D or /exit leaves; so does Ctrl-C once more"
_BASE_MODEL = (
    "[ a base model, without a chat template: it continues each text, and remembers none ]"
)
_CONTEXT_FULL = (
    "the conversation fills the context; /rewind takes back the last question, /clear all of them, "
    "and /set context_policy shift forgets the oldest ones as it goes"
)


def chat(
    llm: LLM,
    *,
    sampling: GenerationArguments,
    system: str | None,
    session: Session | None = None,
    reasoning_budget: int | None = None,
    stats: ShownStats,
) -> int:
    """Chat with the user until they leave, and return the exit code.

    Raises:
        OptionError: a system prompt for a base model, which has no place for it.
    """
    if system is not None and not llm.has_template:
        raise OptionError(
            "this is a base model, without a chat template: it has no place for a system prompt"
        )
    opened = llm.chat(system=system, session=session, reasoning_budget=reasoning_budget, **sampling)
    with exit_on_terminate(), opened as conversation:
        return _Repl(llm, conversation, sampling, stats).run()


class _Repl:
    def __init__(
        self, llm: LLM, conversation: Chat, sampling: GenerationArguments, stats: ShownStats
    ) -> None:
        self._llm = llm
        self._chat = conversation
        self._sampling = sampling  # options that the user has set
        self._shown_stats = stats
        self._last: Completion | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: click.echo(_HELP, err=True),
            "/clear": lambda _: self._clear(),
            "/system": self._set_system,
            "/set": self._set,
            "/show": lambda _: self._show(),
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/regen": lambda _: self._answer(None),
            "/rewind": self._rewind,
            "/fork": self._fork,
            "/switch": self._switch,
            "/infill": self._infill,
        }
        self._forks: dict[str, list[Message]] = {}
        self._input = PromptInput([*self._commands, "/exit"])

    def run(self) -> int:
        name = spelled_out(self._llm.name)
        click.echo(f"{name} - /help lists the commands, /exit leaves", err=True)
        if not self._llm.has_template:
            click.echo(_BASE_MODEL, err=True)
        for note in self._llm.notes if self._shown_stats == "all" else ():
            click.echo(f"[ {spelled_out(note)} ]", err=True)
        with self._input:
            return self._talk()

    def _talk(self) -> int:
        interrupted = False  # whether the last input was Ctrl-C in an empty line
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return INTERRUPTED
                interrupted = not self._input.typed
                if interrupted:
                    click.echo(_HOW_TO_LEAVE, err=True)
                continue
            interrupted = False
            if line in ("/exit", "/bye", "/quit"):
                return 0
            if line:
                self._act(line)

    def _act(self, line: str) -> None:
        """Answer a line or run its command; an error is printed, and the chat goes on."""
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._answer(line.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n"))
        except ContextOverflowError:
            say(_CONTEXT_FULL)
        except (EdgeLLMError, CancelledError) as error:
            say(str(error))

    def _read(self) -> str:
        """Read a line, or all lines between triple quotes."""
        text = self._input.read(">>> ")
        if not text.lstrip().startswith(_QUOTES):
            return text
        while text.count(_QUOTES) < 2:
            text += "\n" + self._input.read("... ", begun=True)
        return text

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            raise OptionError(f"there is no command {name}; /help lists them")
        self._commands[name](rest.strip())

    def _answer(self, text: str | None) -> None:
        """Answer a message; None: answer the last message again."""
        with cancel_on_interrupt() as cancel, progress_bar() as progress:
            if text is not None and not self._llm.has_template:
                pieces = self._llm.stream(
                    text, options=self._chat.options, cancel=cancel, progress=progress
                )
            elif text is None:
                pieces = self._chat.regenerate(cancel=cancel, progress=progress)
            else:
                pieces = self._chat.stream(text, cancel=cancel, progress=progress)
            answer = write(pieces, live=self._shown_stats != "none")
        report(answer, stats=self._shown_stats, as_json=False)
        self._last = answer
        if answer.finish_reason == "length" and len(self._chat.tokens) >= self._llm.ctx_size:
            say(_CONTEXT_FULL)

    def _rewind(self, text: str) -> None:
        questions = [i for i, m in enumerate(self._chat.messages) if m.role == "user"]
        if not (text or "1").isdecimal() or not 1 <= int(text or "1") <= len(questions):
            raise OptionError(f"/rewind {text}: write a number from 1 to {len(questions)}")
        del self._chat.messages[questions[-int(text or "1")] :]
        self._say_length("rewound")

    def _fork(self, text: str) -> None:
        if not text:
            raise OptionError("write /fork NAME")
        self._forks[text] = list(self._chat.messages)
        self._say_length(f"kept as {text}")

    def _switch(self, text: str) -> None:
        if text not in self._forks:
            kept = ", ".join(self._forks) or "none, /fork NAME keeps one"
            raise OptionError(f"/switch {text}: kept are {kept}")
        self._chat.messages[:] = self._forks[text]
        self._say_length(f"switched to {text}")

    def _infill(self, text: str) -> None:
        prefix, gap, suffix = text.partition(_GAP)
        if not gap:
            raise OptionError(f"write /infill TEXT with a {_GAP} in it")
        with cancel_on_interrupt() as cancel:
            pieces = self._llm.stream_infill(prefix, suffix, cancel=cancel, max_tokens=256)
            end_shown_line(write(pieces, end_line=False).text)

    def _system(self) -> str | None:
        first = self._chat.messages[:1]
        return first[0].content if first and first[0].role == "system" else None

    def _clear(self) -> None:
        system = self._system()
        self._chat.messages[:] = [] if system is None else [Message("system", system)]
        self._say_length("cleared")

    def _set_system(self, text: str) -> None:
        if not text:
            shown = without_controls(self._system() or "(the chat template's own)")
            click.echo(shown, err=True)
            return
        self._chat.messages[:] = [Message("system", text)]
        self._say_length("system prompt set")

    def _say_length(self, what: str) -> None:
        questions = sum(message.role == "user" for message in self._chat.messages)
        click.echo(f"{what}; the conversation has {questions} questions", err=True)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        current = asdict(self._chat.options)
        settable = [n for n, v in current.items() if n in MAY_BE_NONE or isinstance(v, _PLAIN)]
        if name not in settable or not value.strip():
            raise OptionError(f"write /set NAME VALUE with NAME one of {', '.join(settable)}")
        new = _parsed(name, value.strip(), current[name])
        given: GenerationArguments = {**self._sampling, name: new}  # type: ignore[misc]
        self._chat.options, self._sampling = self._llm.generation_options(**given), given
        click.echo(f"{name} is {new}", err=True)

    def _show(self) -> None:
        llm = self._llm
        click.echo(
            f"model    {spelled_out(llm.name)}\n"
            f"prefill  {llm.prefill}\n"
            f"decode   {llm.decode}\n"
            f"context  {len(self._chat.tokens)} of {llm.ctx_size} tokens, KV cache "
            f"{llm.options.kv_text}\n"
            + "\n".join(f"{name:18} {v}" for name, v in asdict(self._chat.options).items()),
            err=True,
        )

    def _stats(self, text: str) -> None:
        if text in ("on", "off"):
            self._shown_stats = "all" if text == "on" else "none"
            click.echo(f"stats {text}", err=True)
        elif text:
            raise OptionError(f"/stats {text}: write on, off or nothing")
        elif self._last is None:
            click.echo("there is no answer yet", err=True)
        else:
            report(self._last, stats="all", as_json=False)

    def _save(self, text: str) -> None:
        write_conversation(text, self._chat.messages)
        self._say_length(f"saved in {text}")

    def _load(self, text: str) -> None:
        self._chat.messages[:] = read_conversation(text)
        self._say_length(f"loaded {text}")


def _parsed(name: str, text: str, current: object) -> int | float | str | None:
    """Parse the new value of an option, by the type of its current value.

    Raises:
        OptionError: the text is no value of that type.
    """
    if name in MAY_BE_NONE and text == "none":
        return None
    if isinstance(current, str):
        return text
    if isinstance(current, bool):
        if text not in ("true", "false"):
            raise OptionError(f"{name}: {text!r} is neither true nor false")
        return text == "true"
    try:
        return float(text) if isinstance(current, float) else int(text)
    except ValueError:
        raise OptionError(f"{name}: {text!r} is not a number") from None


_ROLES = ("system", "user", "assistant")
# Far above any conversation that fits into a context.
_MAX_BYTES = 64 << 20


def write_conversation(name: str, messages: Sequence[Message]) -> None:
    """Write a conversation to a file, whole or not at all.

    Raises:
        OptionError: the name is empty, or the file cannot be written.
    """
    path = _path(name)
    if not path.parent.is_dir():
        raise OptionError(f"{path}: there is no folder {path.parent}; make it first")
    values = [_value(message) for message in messages]
    with file_errors(path), replacing_file(path, private=True) as partial:
        text = json.dumps(values, ensure_ascii=False, indent=1)
        partial.write_text(text + "\n", encoding="utf-8", errors="replace")


def read_conversation(name: str) -> list[Message]:
    """Read a conversation that `write_conversation` wrote, or any file of the same form.

    Raises:
        OptionError: the name is empty, or the file cannot be read or has another form.
    """
    path = _path(name)
    wrong = OptionError(
        f"{path}: not a conversation saved with /save; it is a JSON list of messages with a role "
        f"({', '.join(_ROLES)}) and a content"
    )
    try:
        with file_errors(path):
            if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_BYTES):
                raise wrong
            values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, list):
            raise wrong
        messages = [_message(value) for value in values]
    except OptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise wrong from None
    if any(
        m.role not in _ROLES
        or not isinstance(m.content, str)
        or not isinstance(m.reasoning, str | None)
        for m in messages
    ):
        raise wrong
    return messages


def _value(message: Message) -> dict[str, str]:
    value = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        value["reasoning_content"] = message.reasoning
    return value


def _message(value: Mapping[str, str]) -> Message:
    reasoning = value.get("reasoning_content") if value["role"] == "assistant" else None
    return Message(value["role"], value["content"], reasoning=reasoning)


def _path(name: str) -> Path:
    if not name or "\0" in name:
        raise OptionError("name a file")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~name` of an unknown user
        raise OptionError(f"{name}: there is no such user") from None
