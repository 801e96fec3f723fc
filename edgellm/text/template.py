"""Chat templates: untrusted Jinja programs, run in a sandbox with limits on time and size.

Jinja's immutable sandbox keeps a template from Python's internals; it does not keep it from
running or growing for ever. So loops, concatenations, arithmetic, filters and calls are checked
here against a deadline and a size, by rewriting the parsed template before it is compiled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, Self

from jinja2 import TemplateError as JinjaError
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edgellm.errors import OptionError, TemplateError
from edgellm.text.template_limits import formatted_size, joined_size, method_size, replaced_size
from edgellm.text.template_traits import TemplateTraits, probe_traits
from edgellm.text.tool_format import AnswerFormat
from edgellm.text.tool_probe import find_answer_format

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_OUTPUT_CHARACTERS = 1 << 24
TIME_LIMIT_S = 2.0
# Widths, repetitions and ranges above this have no use in a prompt.
_MAX_INTEGER_ARGUMENT = 1_000_000
# What a caller's arguments must not stand for.
_RESERVED = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"]
)
_LONGEST_ARGUMENT = 1000
# Until when the rendering that runs in this thread may take.
_DEADLINE: ContextVar[float] = ContextVar("template deadline", default=0.0)

Message = Mapping[str, Any]
Scalar = bool | int | float | str | None


class _LimitError(Exception):
    """A limit was passed; never seen outside this file."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        bos, eos: texts of the special tokens, as templates expect them.
        time_limit_s: a rendering that takes longer is stopped.

    Raises:
        TemplateError: a syntax error, with its line.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; "
                f"{MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self._names = {"bos_token": bos or "", "eos_token": eos or ""}
        self._time_limit_s = time_limit_s
        self._environment = _Environment()
        self.source = source
        try:
            tree = _Guard().visit(self._environment.parse(source))
            code = self._environment.compile(tree)
            self._template = self._environment.template_class.from_code(
                self._environment, code, self._environment.globals
            )
        except JinjaError as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise TemplateError(f"the chat template is broken{where}: {error}") from None
        except RecursionError:
            raise TemplateError("the chat template is nested too deeply") from None

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Names of `template_arguments` that the template reads, such as `enable_thinking`."""
        names = meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(names) - _RESERVED - set(self._environment.globals)

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template wants of tools and calls; some renderings, 5 ms."""
        return probe_traits(self.render, self.source)

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and calls; some renderings, 5 ms."""
        return find_answer_format(self.render, self.traits, self.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Scalar] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text for a conversation of `{"role": ..., "content": ...}` messages.

        Args:
            tools: OpenAI's function objects.
            template_arguments: variables that the template reads.

        Raises:
            TemplateError: the template refused the messages, failed, or passed a limit.
            OptionError: the template does not read one of the arguments.
        """
        environment = self._environment
        arguments = self._checked_arguments(template_arguments or {})
        deadline = _DEADLINE.set(time.monotonic() + self._time_limit_s)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._names,
                **arguments,
            ):
                size += len(piece)
                environment.check_size(size)
                environment.check_time()
                pieces.append(piece)
        except _LimitError as error:
            raise TemplateError(f"the chat template was stopped: {error}") from None
        except JinjaError as error:
            raise TemplateError(f"the chat template failed: {error}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from None
        except (RecursionError, MemoryError):
            raise TemplateError("the chat template was stopped: too deep or too large") from None
        finally:
            _DEADLINE.reset(deadline)
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


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers renders chat templates in, with limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        sized = {"format": self._format, "join": self._join, "replace": self._replace}
        self.filters = {name: self._limited(f) for name, f in (self.filters | sized).items()}
        self.filters["tojson"] = self._limited(_tojson)
        self.filters[_Guard.LOOP] = self._loop
        self.filters[_Guard.CONCAT] = self._concat
        self.globals = {
            **self.globals,
            "range": self._range,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        }

    def check_time(self) -> None:
        if time.monotonic() > _DEADLINE.get():
            raise _LimitError("it took too long")

    def check_size(self, size: int) -> None:
        if size > MAX_OUTPUT_CHARACTERS:
            raise _LimitError(f"it made more than {MAX_OUTPUT_CHARACTERS} characters")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        if operator == "**" or (operator == "*" and not _is_number(left, right)):
            count = max((n for n in (left, right) if isinstance(n, int)), default=0)
            length = max((len(s) for s in (left, right) if hasattr(s, "__len__")), default=1)
            self.check_size(count * length if operator == "*" else abs(count) ** 2)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            self.check_size(_formatted_size(left, [right]))
        return super().call_binop(context, operator, left, right)

    def call(__self: Self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_time()
        _check_arguments(args, kwargs)
        # the sandbox wraps `format` and `format_map`
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                args = ([*__self._loop(args[0])],)
            values = [*args, *kwargs.values()]
            __self.check_size(
                method_size(owner, name, values, largest_argument=_MAX_INTEGER_ARGUMENT)
            )
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            __self.check_size(len(result))
        return result

    def _limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its arguments before and its result after."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            _check_arguments(args, kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, str | list):
                self.check_size(len(result))
            return result

        marker = getattr(function, "jinja_pass_arg", None)
        if marker is not None:
            limited.jinja_pass_arg = marker  # type: ignore[attr-defined]
        return limited

    def _loop(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.check_time()
            yield value

    def _concat(self, values: Sequence[Any]) -> str:
        texts = [str(value) for value in values]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def _format(self, text: Any, *args: Any, **kwargs: Any) -> str:
        """Jinja's `format` filter, which no `%` operator goes through."""
        text = str(text)
        if args and kwargs:
            raise JinjaError("format takes positional or keyword arguments, not both")
        self.check_size(_formatted_size(text, [*args, *kwargs.values()]))
        formatted: str = text % (kwargs or args)
        return formatted

    def _join(self, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        """Jinja's `join` filter, with its names of arguments."""
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        texts = [str(part) for part in self._loop(value)]
        self.check_size(joined_size(str(d), texts))
        return str(d).join(texts)

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        """Jinja's `replace` filter, with its names of arguments."""
        text, old, new = str(s), str(old), str(new)
        self.check_size(replaced_size(text, old, new))
        replaced: str = text.replace(old, new, -1 if count is None else count)
        return replaced

    def _range(self, *bounds: int) -> range:
        values = range(*bounds)
        if len(values) > _MAX_INTEGER_ARGUMENT:
            raise _LimitError(f"a range of {len(values)}")
        return values


class _Guard(NodeTransformer):
    """Puts a check into every loop and every `~`."""

    LOOP = "edgellm_loop"
    CONCAT = "edgellm_concat"

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, self.LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), self.CONCAT)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks answers for training; it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_INTEGER_ARGUMENT:
            raise _LimitError(f"a call with the argument {value}")


def _formatted_size(text: str, values: Sequence[Any]) -> int:
    return formatted_size(text, values, largest_argument=_MAX_INTEGER_ARGUMENT)
