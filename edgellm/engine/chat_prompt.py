"""From a conversation to the engine's prompt, and from the answer's pieces to its parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgellm.checks import check_flag, check_names, check_number
from edgellm.engine.answer import FilterOfAnswers, LogitFilter, filtered_scores
from edgellm.engine.call import CallArguments, ChatArguments, ChatCallArguments
from edgellm.engine.engine import Engine
from edgellm.errors import OptionError, TemplateError
from edgellm.generation_options import GenerationOptions
from edgellm.results import Piece
from edgellm.text.answer_parser import AnswerDelta, AnswerParser
from edgellm.text.grammar import GrammarFilter, MatcherFilter
from edgellm.text.prompt import (
    Message,
    check_messages,
    encode_conversation,
    required_template,
)
from edgellm.text.tokenizer import Tokenizer
from edgellm.text.tool_format import AnswerFormat, CallFormat, ObjectKeys
from edgellm.text.tool_grammar import after_reasoning, loosened, tool_grammar
from edgellm.tool_use import (
    Tool,
    ToolArguments,
    ToolCall,
    ToolChoice,
    checked_choice,
    checked_tools,
)

if TYPE_CHECKING:
    from edgellm.text.template import ChatTemplate, Scalar


# Tokens at a prompt's end in which the beginning of the reasoning is looked for, and tokens that an
# answer may have before it.
_TAIL, _FEW = 32, 4
_SCHEMAS = "the tools' parameters"  # in messages
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Checked `ToolArguments`."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_arguments: Mapping[str, Scalar] | None = None
    reasoning_budget: int | None = None

    @property
    def required(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def parallel(self) -> bool:
        """Whether the answer may have several tool calls; a tool that is named is called once."""
        return self.parallel_tool_calls and isinstance(self.tool_choice, str)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that this answer may call."""
        if isinstance(self.tool_choice, str):
            return () if self.tool_choice == "none" else self.tools
        return tuple(tool for tool in self.tools if tool.name == self.tool_choice["name"])

    def changed(self, arguments: ToolArguments) -> ToolOptions:
        """Return these options with other values in the fields that are given.

        Raises:
            OptionError: a value is not allowed.
        """
        values = {**self.__dict__, **arguments}
        tools = checked_tools(values["tools"])
        check_flag("parallel_tool_calls", values["parallel_tool_calls"])
        template_arguments, budget = values["template_arguments"], values["reasoning_budget"]
        if budget is not None:
            check_number("reasoning_budget", budget, 0, whole=True)
        if template_arguments is not None and not isinstance(template_arguments, Mapping):
            raise OptionError(
                f"`template_arguments` is {template_arguments!r:.60}; a dict is expected"
            )
        return ToolOptions(
            tools=tools,
            tool_choice=checked_choice(values["tool_choice"], tools),
            parallel_tool_calls=values["parallel_tool_calls"],
            template_arguments=template_arguments,
            reasoning_budget=budget,
        )


def split_arguments(
    arguments: ChatCallArguments | ChatArguments, *others: str
) -> tuple[CallArguments, ToolArguments]:
    """Split arguments into those of any answer, and those of tools and template.

    Args:
        others: names beside the fields of `GenerationOptions` that are allowed.

    Raises:
        TypeError: an argument is neither.
    """
    names = ToolArguments.__annotations__
    check_names(arguments, GenerationOptions, *names, *others)
    tools = {name: value for name, value in arguments.items() if name in names}
    rest = {name: value for name, value in arguments.items() if name not in names}
    return rest, tools  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """Prompt for an answer to a conversation, and the format of the answer.

    Attributes:
        tokens: tokens of the prompt.
        shown_special: ids of special tokens that are part of the answer's text.
        logit_filter: the caller's filter, and that of calls to tools; None: no filter.
    """

    tokens: list[int]
    shown_special: frozenset[int]
    logit_filter: LogitFilter | None
    format: AnswerFormat
    tools: tuple[Tool, ...]
    in_reasoning: bool
    short_ids: bool
    parallel: bool

    def reader(self) -> AnswerReader:
        """Return a reader that takes one answer's pieces apart."""
        return AnswerReader(self)


def chat_prompt(
    engine: Engine,
    messages: Sequence[Message],
    options: ToolOptions,
    *,
    logit_filter: LogitFilter | None = None,
    continue_last: bool = False,
    check_size: Callable[[int], None] | None = None,
) -> ChatPrompt:
    """Return the prompt for a conversation, and the format of its answer.

    Args:
        logit_filter: the caller's filter, applied before that of tools. A grammar holds the text
            after reasoning that the prompt began, and no answer that may be a call.
        continue_last, check_size: see `encode_conversation`.

    Raises:
        TemplateError: the template does not take these messages or any tools.
        OptionError: a message, a tool or an argument of the template is wrong.
    """
    check_messages(messages)
    template, tokenizer = required_template(engine.template), engine.tokenizer
    form = template.answer_format
    takes_tools = bool(template.traits.takes_tools and form.calls)
    # tools that this answer may not call are described only if earlier messages call tools
    wanted = options.callable_tools or any(m.tool_calls or m.role == "tool" for m in messages)
    generic = bool(options.tools and wanted) and not takes_tools
    if generic:
        if options.tool_choice == "auto":
            raise _no_tools(template)
        form, messages = generic_format(form), in_words(messages, options.tools)
    tokens = encode_conversation(
        messages,
        template,
        tokenizer,
        tools=options.tools if takes_tools else (),
        template_arguments=options.template_arguments,
        continue_last=continue_last,
        check_size=check_size,
    )
    if not options.callable_tools:
        form = replace(form, calls=None)
    marks, parsed = form.reasoning, bool(form.calls or form.reasoning)
    tail = tokenizer.decode(tokens[-_TAIL:], skip_special=False).rstrip()
    shown = [text for text in tokenizer.special_texts if parsed and text and text in form.markers]
    prompt = ChatPrompt(
        tokens=tokens,
        shown_special=frozenset(tokenizer.added_tokens[text] for text in shown),
        logit_filter=logit_filter,
        format=form,
        tools=options.callable_tools,
        in_reasoning=marks is not None and tail.endswith(marks.open),
        short_ids=template.traits.short_ids,
        parallel=options.parallel and form.calls is not None and form.calls.parallel,
    )
    if isinstance(logit_filter, GrammarFilter):
        filters: list[LogitFilter | None] = [_behind_reasoning(engine, prompt, logit_filter)]
    else:
        tools = _tools_matcher(engine, prompt, options) if prompt.tools else None
        filters = [logit_filter, tools and MatcherFilter(tools, _SCHEMAS)]
    filters.append(_reasoning_end(tokenizer, prompt, options))
    given = [each for each in filters if each is not None]
    combined = AllFilters(*given) if len(given) > 1 else next(iter(given), None)
    return replace(prompt, logit_filter=combined)


def _tools_matcher(engine: Engine, prompt: ChatPrompt, options: ToolOptions) -> Any:
    """Make the matcher of the grammar for calls; a tool's schema never refuses a request."""

    def matcher(tools: Sequence[Tool]) -> Any:
        grammar = tool_grammar(
            prompt.format,
            tools,
            required=options.required,
            parallel=prompt.parallel,
            in_reasoning=prompt.in_reasoning,
            added=engine.tokenizer.added_tokens,
        )
        return engine.grammars.matcher(grammar, _SCHEMAS)

    def compiles(tool: Tool) -> bool:
        try:
            matcher([tool])
        except OptionError:
            return False
        return True

    try:
        return matcher(prompt.tools)
    except OptionError as error:
        loose = [loosened(tool, compiles) for tool in prompt.tools]
        changed = [new.name for new, old in zip(loose, prompt.tools, strict=True) if new != old]
        if not changed:  # the format is the problem, or all of them together
            raise
        _log.warning("%s; not all arguments of %s are held to it", error, ", ".join(changed))
        return matcher(loose)


def _behind_reasoning(engine: Engine, prompt: ChatPrompt, held: GrammarFilter) -> LogitFilter:
    """Return a grammar's filter, for the text after reasoning if the prompt has begun it."""
    if prompt.tools:
        raise OptionError(
            f"an answer is either held to {held.grammar.name} (`response_format`) or calls "
            '`tools`; leave one of them out, or set `tool_choice` to "none"'
        )
    if not prompt.in_reasoning:
        return held
    added = engine.tokenizer.added_tokens
    grammar = after_reasoning(prompt.format, held.grammar, added=added)
    return MatcherFilter(engine.grammars.matcher(grammar, held.grammar.name), held.grammar.name)


class AnswerReader:
    """Reader that takes the pieces of one answer apart into content, reasoning and tool calls.

    Attributes:
        raw: text as the model wrote it.
    """

    def __init__(self, prompt: ChatPrompt) -> None:
        self.raw = ""
        self._shown_special = prompt.shown_special
        self._parser: AnswerParser | None = None
        if prompt.format.calls is not None or prompt.format.reasoning is not None:
            self._parser = AnswerParser(
                prompt.format,
                tools=prompt.tools or None,
                in_reasoning=prompt.in_reasoning,
                short_ids=prompt.short_ids,
                parallel=prompt.parallel,
            )

    def is_text_of(self, tokens: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether the text that was read is exactly that of these tokens."""
        if not self._shown_special:
            return tokenizer.decode(tokens) == self.raw
        return tokenizer.decode(tokens, skip_special=False) == self.raw

    def read(self, piece: Piece) -> Piece:
        """Return the piece with its text taken apart; the last one has the text held back."""
        self.raw += piece.text
        if self._parser is None:
            return piece
        delta = self._parser.add(piece.text)
        reason = piece.finish_reason
        if reason is not None:
            rest = self._parser.finish()
            delta = AnswerDelta(
                delta.content + rest.content,
                delta.reasoning + rest.reasoning,
                delta.tool_calls + rest.tool_calls,
            )
            if reason == "stop" and self._parser.calls:
                reason = "tool_calls"
        return replace(
            piece,
            text=delta.content,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            finish_reason=reason,
        )


class ReasoningBudget:
    """A logit filter that ends reasoning of some length, as if the model had written its end.

    Args:
        limit: maximum of tokens of reasoning.
        open, close: tokens of the markers around reasoning.
        begun: whether the prompt has begun the reasoning.
    """

    def __init__(self, limit: int, *, open: list[int], close: list[int], begun: bool) -> None:
        self._limit, self._open, self._close, self._begun = limit, open, close, begun

    def for_answer(self) -> ReasoningBudget:
        return self  # all it needs is in the tokens of the answer

    def __call__(self, scores: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Rule out all but the next token of the end marker, in place, where the limit is reached.

        Args:
            tokens: tokens of the answer so far.
        """
        begin, size = self._first(tokens), len(self._close)
        if begin is None or len(tokens) - begin < self._limit:
            return
        thoughts = list(tokens[begin:])
        if any(thoughts[i : i + size] == self._close for i in range(len(thoughts) - size + 1)):
            return
        written = max(k for k in range(size) if thoughts[len(thoughts) - k :] == self._close[:k])
        scores[:] = -np.inf
        scores[self._close[written]] = 0

    def _first(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens before the reasoning; None: it has not begun."""
        if self._begun:
            return 0
        for at in range(_FEW):  # the model may write white space before its marker
            if list(tokens[at : at + len(self._open)]) == self._open:
                return at + len(self._open)
        return None


def _reasoning_end(
    tokenizer: Tokenizer, prompt: ChatPrompt, options: ToolOptions
) -> ReasoningBudget | None:
    marks, limit = prompt.format.reasoning, options.reasoning_budget
    if marks is None or limit is None:
        return None
    open, close = (
        tokenizer.encode(mark.strip(), add_bos=False, parse_special=True)
        for mark in (marks.open, marks.close)
    )
    return ReasoningBudget(limit, open=open, close=close, begun=prompt.in_reasoning)


class AllFilters:
    """Logit filters, applied one after the other."""

    def __init__(self, *filters: LogitFilter) -> None:
        self._filters = filters

    def for_answer(self) -> AllFilters:
        """Return all filters for one answer."""
        return AllFilters(*map(_for_answer, self._filters))

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        for each in self._filters:
            logits = filtered_scores(each, logits, tokens)
        return logits


def _for_answer(logit_filter: LogitFilter) -> LogitFilter:
    return logit_filter.for_answer() if isinstance(logit_filter, FilterOfAnswers) else logit_filter


def _no_tools(template: ChatTemplate) -> TemplateError:
    reason = template.answer_format.no_calls
    if not template.traits.takes_tools:
        reason = "this model's chat template has no place for tools"
    return TemplateError(
        f"{reason}, so the model was not trained to choose among them; take one that was, such as "
        'Qwen3, or ask for a call with `tool_choice="required"` or the name of a tool'
    )


_PROMPT = """\
You can call these functions. Their signatures are:
<tools>
{tools}
</tools>
To call one, answer with a JSON object with its name and arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""

_CALLS = CallFormat(
    kind="object",
    open="<tool_call>\n",
    close="\n</tool_call>",
    between="\n",
    keys=ObjectKeys(name="name", arguments="arguments"),
)


def generic_format(format: AnswerFormat) -> AnswerFormat:
    """Return an answer format with its tool calls replaced by those of the generic form.

    The form is that of Hermes, which most small models have seen in training. A model whose chat
    template has no place for tools does not choose one by itself, so a grammar holds it to a call.
    """
    return replace(format, calls=_CALLS)


def in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation with tools in its system prompt, and calls and results as text."""
    described = "\n".join(json.dumps(tool.to_json(), ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=described)
    first = messages[0] if messages and messages[0].role in ("system", "developer") else None
    system = prompt if first is None else f"{first.content}\n\n{prompt}"
    rest = messages if first is None else messages[1:]
    return [Message("system", system), *map(_in_words, rest)]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(map(_call_in_words, message.tool_calls))
    content = f"{message.content}\n{calls}" if message.content else calls
    return Message("assistant", content, message.tokens, reasoning=message.reasoning)


def _call_in_words(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
