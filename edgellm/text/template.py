"""Chat templates: untrusted Jinja programs, run in a sandbox with limits on time and size.

Jinja's immutable sandbox keeps a template from Python's internals, but not from running or growing
for ever. So it has only the statements, filters, tests, functions and methods that released chat
templates use, and each operation that can make or read much text is a call that pays for it:
parsed templates are checked, and rewritten to pay for their work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from edgellm.errors import EdgeLLMError, OptionError, TemplateError
from edgellm.text import template_functions as functions
from edgellm.text import template_operators as operators
from edgellm.text.template_budget import (
    ITEM,
    TIME_LIMIT_S,
    WORK_LIMIT,
    LimitError,
    budget,
    each,
    spend,
    text_of,
)
from edgellm.text.template_traits import TemplateTraits, probe_traits
from edgellm.text.tool_format import AnswerFormat
from edgellm.text.tool_probe import find_answer_format

_STATEMENTS = (
    nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.CallBlock, nodes.Continue,
    nodes.FilterBlock, nodes.For, nodes.If, nodes.Macro, nodes.Output, nodes.With,
)  # fmt: skip
# Filters that the guard puts into templates, under names that no template can write.
_COMPARE, _CONCAT, _CUT, _KEY, _LITERAL, _LOOP = (
    f"<{name}>" for name in ("compare", "concat", "cut", "key", "literal", "loop")
)


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment like that of transformers for chat templates, with limits."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            optimized=False,  # constants are computed when there is a budget
            finalize=_printed,
        )
        self.filters = {
            **functions.FILTERS,
            _COMPARE: operators.compare,
            _CONCAT: operators.concat,
            _CUT: operators.cut,
            _KEY: operators.key,
            _LITERAL: operators.literal,
            _LOOP: each,
        }
        self.tests = dict(functions.TESTS)
        self.globals = dict(functions.FUNCTIONS)

    def guarded(self, source: str) -> nodes.Template:
        """Parse a template, and rewrite it so that each operation pays for its work.

        Raises:
            jinja2.TemplateError: the source has a syntax error, or a statement that is not for chat
                templates.
        """
        tree = self.parse(source)
        for node in tree.find_all(nodes.Stmt):
            recursive = isinstance(node, nodes.For) and node.recursive
            if recursive or not isinstance(node, _STATEMENTS):
                name = "recursive loops" if recursive else f"`{type(node).__name__.lower()}`"
                raise TemplateSyntaxError(f"chat templates have no {name}", node.lineno)
        guarded: nodes.Template = _Guard().visit(tree)
        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        operators.pay_arithmetic(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self: Self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend(ITEM * (1 + len(args) + len(kwargs)))
        # the sandbox wraps `format` and `format_map`
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | dict):
            args = operators.called_method(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        spend(ITEM)
        return super().getitem(obj, operators.key(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in operators.ATTRIBUTES)


@pass_context  # so that Jinja does not call it when it compiles
def _printed(context: Any, value: Any) -> str:
    return text_of(value)


class _Guard(NodeTransformer):
    """Rewriter of operations that Jinja compiles to plain Python, into calls of paying filters."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            nodes.Const(child.data, lineno=child.lineno)
            if isinstance(child, nodes.TemplateData)
            else child
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _LOOP)
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Expr:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _filter(node.dyn_args, _LOOP)
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Filter:
        self.generic_visit(node)
        sides = [side for op in node.ops for side in (nodes.Const(op.op), op.expr)]
        return _filter(node.expr, _COMPARE, *sides)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, _CUT, *(bound or nodes.Const(None) for bound in bounds))

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, _LITERAL)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, _LITERAL) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _filter(pair.key, _KEY)
        return _filter(node, _LITERAL)


class _GenerationBlock(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, a mark for training without effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


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
