"""Chat templates: untrusted Jinja programs, run in a sandbox with limits on time and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import meta

from edgellm.errors import EdgeLLMError, OptionError, TemplateError
from edgellm.text.template_budget import TIME_LIMIT_S, WORK_LIMIT, LimitError, budget
from edgellm.text.template_sandbox import Sandbox
from edgellm.text.template_traits import TemplateTraits, probe_traits
from edgellm.text.tool_format import AnswerFormat
from edgellm.text.tool_probe import find_answer_format

MAX_TEMPLATE_CHARACTERS = 1 << 16
MAX_OUTPUT_CHARACTERS = 1 << 24
# Names that `template_arguments` must not have.
_RESERVED = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"]
)
_LONGEST_ARGUMENT = 1000
_LONGEST_ERROR = 500

Message = Mapping[str, Any]
Scalar = bool | int | float | str | None


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        bos, eos: texts of the begin and end tokens, which templates read.
        time_limit_s: processor time after which a rendering is stopped.
        work_limit: limit on the characters that a rendering makes on its way; see
            `template_budget.py`.

    Raises:
        TemplateError: the source is too long or has a syntax error, named with its line.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        work_limit: int = WORK_LIMIT,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; "
                f"{MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self._names = {"bos_token": bos or "", "eos_token": eos or ""}
        self._limits = (work_limit, time_limit_s)
        self._sandbox = sandbox = Sandbox()
        self.source = source
        with _template_errors("is broken"):
            code = sandbox.compile(sandbox.guarded(source))
            self._template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of `template_arguments` that the template reads, such as `enable_thinking`."""
        with _template_errors("is broken"):
            names = meta.find_undeclared_variables(self._sandbox.parse(self.source))
        return frozenset(names) - _RESERVED - set(self._sandbox.globals)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Traits of the template's tools and calls; found by some renderings, 5 ms."""
        with budget(*self._limits):
            return probe_traits(self.render, self.source)

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """Format in which the model writes reasoning and calls; found by renderings, 5 ms."""
        with budget(*self._limits):
            return find_answer_format(self.render, self.traits, self.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Scalar] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the prompt text of a conversation of `{"role": ..., "content": ...}` messages.

        Args:
            tools: OpenAI's function objects.
            template_arguments: variables that the template reads.
            add_generation_prompt: whether to end with the beginning of an answer.

        Raises:
            TemplateError: the template refused the messages, failed, or exceeded a limit.
            OptionError: the template does not read one of the arguments.
        """
        arguments = self._checked_arguments(template_arguments or {})
        pieces, size = [], 0
        with budget(*self._limits), _template_errors("failed"):
            for piece in self._template.generate(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._names,
                **arguments,
            ):
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise LimitError(f"it wrote more than {MAX_OUTPUT_CHARACTERS} characters")
                pieces.append(piece)
        return "".join(pieces)

    def _checked_arguments(self, arguments: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        for name, value in arguments.items():
            if name not in self.arguments:
                known = ", ".join(sorted(map(str, self.arguments))) or "none"
                raise OptionError(
                    f"`template_arguments`: {str(name)[:60]!r} is nothing that this model's chat "
                    f"template reads; allowed are: {known}"
                )
            right = value is None or isinstance(value, bool | int | float | str)
            if not right or len(str(value)) > _LONGEST_ARGUMENT:
                raise OptionError(
                    f"`template_arguments`: {name} has to be true, false, a number or a text of at "
                    f"most {_LONGEST_ARGUMENT} characters"
                )
        return arguments


@contextmanager
def _template_errors(what: str) -> Iterator[None]:
    """Turn any exception of Jinja or of a template in the block into a TemplateError."""
    try:
        yield
    except EdgeLLMError:
        raise
    except LimitError as error:
        raise TemplateError(f"the chat template was stopped: {error}") from None
    except JinjaError as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        message = error.message or type(error).__name__
        raise TemplateError(
            f"the chat template {what}{where}: {message[:_LONGEST_ERROR]}"
        ) from None
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise TemplateError(f"the chat template {what}: {message[:_LONGEST_ERROR]}") from None
