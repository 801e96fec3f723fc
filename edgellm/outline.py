"""Long answers whose points are written together, from one prefix.

Skeleton-of-Thought (Ning et al., arXiv:2307.15337): the model lists the points of its answer, and
then writes all of them in the same steps, each of which reads the weights once for all points.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar, Unpack

from edgellm.cache.prefix_index import common_prefix
from edgellm.checks import check_number, check_text
from edgellm.engine.call import Call, CallArguments
from edgellm.engine.loop import Wait, arun, run
from edgellm.engine.turned import compute
from edgellm.errors import OptionError
from edgellm.generation import BatchAnswer, BatchRequest, TextGeneration, prompt_tokens
from edgellm.results import Completion
from edgellm.session import Session
from edgellm.text.prompt import Message

_SKELETON = (
    "Give only the outline of an answer to the question below, not the answer: a numbered list of "
    "{least} to {most} points, each of 3 to 5 words, in a line of its own.\n\nQuestion: {question}"
)
_POINT = (
    "An answer to the question below has this outline.\n\nQuestion: {question}\n\n"
    "Outline:\n{outline}\n\nWrite one point of it in one or two sentences, and no other point. "
    "The point to write: {title}"
)
_LISTED = re.compile(r"^[ \t]*[*_]*(\d+[.)]|[-*\u2022])[ \t]+(.*\w.*)$", re.MULTILINE)

T = TypeVar("T")
# A part of a `Pending`: it yields what it waits for, and returns items.
_Items: TypeAlias = Generator[Wait, None, list[T]]


@dataclass(frozen=True)
class OutlinePoint:
    """A point of an outline, with its text in `completion`."""

    title: str
    completion: Completion


@dataclass(frozen=True)
class Outline:
    """An answer that was outlined first.

    Attributes:
        skeleton: the answer that lists the points.
        points: the points, those that have a number if any has; without the last one of a list that
            `max_tokens` cut, and none of a list that was stopped.
    """

    skeleton: Completion
    points: tuple[OutlinePoint, ...]

    @property
    def text(self) -> str:
        """The points as a numbered list; the text of `skeleton` where there are none."""
        if not self.points:
            return self.skeleton.text
        return "\n".join(
            f"{number}. {point.title}: {point.completion.text.strip()}"
            for number, point in enumerate(self.points, 1)
        )


class Outlining(TextGeneration):
    """Methods of `LLM` for long answers in points."""

    system: str | None

    def outline(
        self, question: str, *, max_points: int = 10, **arguments: Unpack[CallArguments]
    ) -> Outline:
        """Answer a question by an outline whose points are written together.

        Its tokens come faster than those of one long answer, which have to wait for each other. It
        fits questions whose points do not build on each other.

        Args:
            max_points: points that are asked for at most; a longer numbered list is stopped.
            arguments: see `CallArguments`; `max_tokens` and `time_limit_ms` are for the list and
                for each point, and `progress` is told how many points are there.

        Raises:
            OptionError: an argument is not allowed; `json_schema` and `grammar` are not.
            TemplateError: the model has no chat template.
            ContextOverflowError: the question, or the list behind it, does not fit into the
                context.
        """
        work = self._outlined(question, max_points, self._outline_call(arguments))
        return run(self.engine.loop, work)

    async def aoutline(
        self, question: str, *, max_points: int = 10, **arguments: Unpack[CallArguments]
    ) -> Outline:
        """Answer a question as `outline` does, for asyncio; see `Session.astream`."""
        work = self._outlined(question, max_points, self._outline_call(arguments))
        return await arun(self.engine.loop, work)

    def _outlined(
        self, question: str, max_points: int, call: Call
    ) -> Generator[Wait, None, Outline]:
        check_text("question", question)
        check_number("max_points", max_points, 1, 64, whole=True)
        if not question.strip():
            raise OptionError("`question` is empty; give the text of a question")
        least = min(3, max_points)
        asked = _SKELETON.format(least=least, most=max_points, question=question)
        enough = [*call.options.stop, f"\n{max_points + 1}."]
        listing = replace(call, options=replace(call.options, stop=enough), progress=None)
        [skeleton] = yield from self._together([self._asked(asked)], listing)
        points = list[OutlinePoint]()
        if skeleton.finish_reason not in ("cancelled", "time"):
            titles = _titles(skeleton.text)
            if skeleton.finish_reason == "length":
                del titles[-1:]
            points = yield from self._points(question, titles[:max_points], call)
        return Outline(skeleton, tuple(points))

    def _points(self, question: str, titles: Sequence[str], call: Call) -> _Items[OutlinePoint]:
        outline = "\n".join(f"{number}. {title}" for number, title in enumerate(titles, 1))
        prompts = [
            self._asked(_POINT.format(question=question, outline=outline, title=title))
            for title in titles
        ]
        with Session(self.engine, adapter=call.options.adapter) as session:
            if len(prompts) > 1:
                # to the token: of a prompt on its way others find whole blocks of 128
                first, second = (prompt_tokens(self.engine, prompt) for prompt in prompts[:2])
                session.replace(first[: common_prefix(first, second)])
                unlimited = replace(call.options, time_limit_ms=None)
                prefill = replace(call, options=unlimited, progress=None)
                yield from compute(self.engine, session._context, prefill)
            requests = [BatchRequest(prompt=prompt, session=session) for prompt in prompts]
            completions = yield from self._together(requests, call)
        return [OutlinePoint(*each) for each in zip(titles, completions, strict=True)]

    def _together(
        self, prompts: Sequence[list[Message] | BatchRequest], call: Call
    ) -> _Items[Completion]:
        """Answer prompts, and return the answers in their order."""
        completions = dict[int, Completion]()
        with closing(self._batch(prompts, 1, call)) as pending:
            for item in pending:
                if isinstance(item, BatchAnswer):
                    completions[item.index] = item.result()
                else:
                    yield item
        return [completions[index] for index in range(len(prompts))]

    def _outline_call(self, arguments: CallArguments) -> Call:
        for name in ("json_schema", "grammar"):
            if arguments.get(name) is not None:
                raise OptionError(
                    f"`{name}`: the list of points would be of this form; leave it out"
                )
        return self._call(arguments)

    def _asked(self, text: str) -> list[Message]:
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, Message("user", text)]


def _titles(text: str) -> list[str]:
    """Return the points of a list, in plain words and each once."""
    lines = [(mark[0].isdigit(), title.strip(" *_:.")) for mark, title in _LISTED.findall(text)]
    numbered = any(has_number for has_number, _ in lines)
    return list(dict.fromkeys(title for has, title in lines if title and has == numbered))
