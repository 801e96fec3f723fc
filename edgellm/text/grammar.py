"""Logit filters for answers that follow a grammar, such as JSON of a schema.

The grammar engine `llguidance` finds at each step which tokens can still lead to a valid
document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgellm.checks import check_choice, check_references, check_text
from edgellm.errors import OptionError
from edgellm.text.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "gbnf", "lark", "regex"]
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)
MAX_GRAMMAR_CHARACTERS = 1 << 18
# Bounded, because a model may otherwise write spaces for ever.
WHITESPACE = r"[ \n]{0,12}"
# Where a message of llguidance begins to list the grammar, which may have thousands of lines.
_LISTING = re.compile(r"\n +\d+ \| ")
_NAMES = {
    "json_schema": "the JSON schema",
    "gbnf": "the grammar",
    "lark": "the grammar",
    "regex": "the regular expression",
}
_LARK = re.compile(
    r"^[ \t]*(%llguidance\b|[?!]?start(\[[^\]\n]*\]|\.\d+)?[ \t]*:(?!:))", re.MULTILINE
)
_LARK_RULE = re.compile(r"^[ \t]*[?!]?\w+(\[[^\]\n]*\]|\.\d+)?[ \t]*:", re.MULTILINE)
_NEW_NAME = re.compile(r"rule\d+")
# llguidance compiles by recursion: 2,000 rules in a chain pass, 3,000 end the process.
_MOST_RULES = 1000
# Work of the lexer in one step; 128 tools take up to twice the 200,000 that llguidance allows.
_LEXER_FUEL = 1_000_000
_LONGEST_MESSAGE = 300
# Parts of GBNF: a comment, a text, a class, a number of times, a name, any character. A part that
# is not closed ends with the text, so that looking for its end takes linear time.
_GBNF = re.compile(
    r'#[^\n]*|"(?:[^"\\]|\\.)*(?:"|\Z)|\[(?:[^\]\\]|\\.)*(?:\]|\Z)|\{[^}\n]*|[-\w]+|\.',
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
# Parts of Lark whose text is no name, and names of terminals.
_TERMINAL = re.compile(
    r'//[^\n]*|"(?:[^"\\]|\\.)*(?:"|\Z)|/(?:[^/\\]|\\.)*(?:/|\Z)|\b[A-Z][A-Z0-9_]*\b', re.DOTALL
)


@dataclass(frozen=True)
class Grammar:
    """The form that answers are held to.

    Attributes:
        kind: notation of `text`: a JSON schema; llama.cpp's GBNF; llguidance's Lark; or a regular
            expression of the whole answer in Rust's syntax, without look-around.
        text: at most `MAX_GRAMMAR_CHARACTERS` unless it is a schema.

    Raises:
        OptionError: a value is not allowed.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, GRAMMAR_KINDS)
        check_text("grammar", self.text)
        if self.kind != "json_schema":
            _check_size(self.text, self.name)
        if not self.text.isascii() and any("\ud800" <= c < "\ue000" for c in self.text):
            raise OptionError(f"{self.name} has half a surrogate pair, which is no character")

    @property
    def name(self) -> str:
        """Name of the grammar in messages."""
        return _NAMES[self.kind]

    @classmethod
    def of(cls, text: str) -> Grammar:
        """Return a grammar in GBNF, or in Lark if it has a rule `start:` or begins as such."""
        check_text("grammar", text)
        _check_size(text, "the grammar")
        return cls("lark" if _LARK.search(text) else "gbnf", text)

    @classmethod
    def one_of(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of answers that are one of the texts."""
        if isinstance(texts, str) or not texts:
            raise OptionError("a list of at least one text is expected to choose from")
        quoted = (f'"{"".join(map(_escaped, text))}"' for text in texts)
        return cls("lark", f"start: TEXT\nTEXT: {' | '.join(quoted)}")

    def lark(self) -> str:
        """Return the grammar in llguidance's Lark.

        Raises:
            OptionError: it is a schema, or cannot be converted.
        """
        if self.kind == "lark":
            return self._few_rules(self.text)
        llguidance = _import_llguidance()
        if self.kind == "regex":
            return f"start: /{llguidance.regex_to_lark(self.text)}/"
        from llguidance.gbnf_to_lark import gbnf_to_lark

        names = {"root": "root"}
        try:
            return self._few_rules(_as_rules(gbnf_to_lark(_prepared(self.text, names))))
        except OptionError:
            raise
        except RecursionError:
            raise OptionError(f"{self.name} cannot be used: it is nested too deep") from None
        except Exception as error:  # the converter's own kinds are plain exceptions
            given = {new: old for old, new in names.items()}
            message = _NEW_NAME.sub(lambda match: given.get(match[0], match[0]), str(error))
            message = message[:_LONGEST_MESSAGE]
            raise OptionError(f"{self.name} cannot be used: {message}") from None

    def _few_rules(self, lark: str) -> str:
        count = sum(1 for _ in _LARK_RULE.finditer(lark))
        if count > _MOST_RULES:
            raise OptionError(f"{self.name} has {count} rules; at most {_MOST_RULES} are allowed")
        return lark


def _check_size(text: str, name: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise OptionError(
            f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )


def _prepared(gbnf: str, names: dict[str, str]) -> str:
    """Return GBNF that llguidance's converter takes as llama.cpp does.

    Rules get names that no other notation gives a meaning, and characters the escapes that Rust's
    regular expressions know.

    Args:
        names: new names by those of the grammar; more are added.
    """

    def part(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] in "#{":
            return "" if text[0] == "#" else text
        if text[0] == '"':
            closed = len(text) > 1 and text.endswith('"')
            return f'"{"".join(map(_escaped, _characters(text[1:-1])))}"' if closed else text
        if text[0] == "[":
            return f"[{_class(text[1:-1])}]" if text.endswith("]") else text
        return r"[^\x00]" if text == "." else names.setdefault(text, f"rule{len(names)}")

    return _GBNF.sub(part, gbnf)


def _characters(text: str) -> list[str]:
    """Return the characters of a text or class with llama.cpp's escapes."""
    return [_character(match[0]) for match in _CHARACTER.finditer(text)]


def _character(text: str) -> str:
    if len(text) == 1:
        return text
    if len(text) == 2:
        return _ESCAPED.get(text[1], text[1])
    code = int(text[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise OptionError(f"the grammar cannot be used: {text} is no character")
    return chr(code)


def _escaped(character: str) -> str:
    plain = character.isalnum() or character == " " or ord(character) > 127
    return character if plain else f"\\x{ord(character):02x}"


def _class(text: str) -> str:
    """Return the content of a class in which a hyphen between two characters makes a range."""
    negated = text.startswith("^")
    characters = _characters(text[negated:])
    hyphens = [match[0] == "-" for match in _CHARACTER.finditer(text[negated:])]
    parts, i = ["^" if negated else ""], 0
    while i < len(characters):
        if i + 2 < len(characters) and hyphens[i + 1]:
            parts.append(f"{_escaped(characters[i])}-{_escaped(characters[i + 2])}")
            i += 3
        else:
            parts.append(_escaped(characters[i]))
            i += 1
    return "".join(parts)


def _as_rules(lark: str) -> str:
    """Return a converted grammar with rules in the place of terminals.

    A terminal matches the longest text, so that `[0-9 ]+ " "` would match nothing. A mask takes
    1 ms in place of 3 us for llama.cpp's grammar of JSON and 49,152 tokens; a schema has no such
    cost.
    """

    def renamed(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in '/"' else match[0].lower()

    return _TERMINAL.sub(renamed, lark)


class Grammars:
    """Maker of grammars for the vocabulary of one tokenizer, which is prepared once (0.3 s).

    Raises:
        OptionError: llguidance cannot be imported.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._llguidance = _import_llguidance()
        self._vocabulary = self._llguidance.LLTokenizer(
            tokenizer.to_json(), eos_token=sorted(tokenizer.eos_ids)
        )

    def filter(self, grammar: Grammar) -> GrammarFilter:
        """Make a logit filter for a grammar; see `GrammarFilter`."""
        return GrammarFilter(self, grammar)

    def matcher_of(self, grammar: Grammar) -> Any:
        """Make llguidance's matcher for a grammar, at the beginning of a document.

        Raises:
            OptionError: the grammar is wrong, or not supported.
        """
        if grammar.kind == "json_schema":
            return self._schema_matcher(grammar.text)
        return self.matcher(grammar.lark(), grammar.name)

    def _schema_matcher(self, schema: str) -> Any:
        try:
            check_references("the JSON schema", json.loads(schema))
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": WHITESPACE}
            )
        except OptionError:
            raise
        except json.JSONDecodeError as error:
            raise OptionError(f"the JSON schema is not JSON: {error}") from None
        except RecursionError:
            raise OptionError("the JSON schema cannot be used: it is nested too deep") from None
        except ValueError as error:
            raise OptionError(f"the JSON schema cannot be used: {error}") from None
        return self.matcher(grammar, "the JSON schema")

    def matcher(self, grammar: str, what: str) -> Any:
        """Make llguidance's matcher for a grammar, at the beginning of a document.

        Args:
            grammar: grammar in llguidance's notation.
            what: name of the grammar in messages.

        Raises:
            OptionError: the grammar is wrong or not supported.
        """
        limits = self._llguidance.LLParserLimits(step_lexer_fuel=_LEXER_FUEL)
        matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if problem := matcher.get_error():
            problem = _LISTING.split(problem)[0][:_LONGEST_MESSAGE]
            raise OptionError(f"{what} cannot be used: {problem}")
        return matcher


class MatcherFilter:
    """A logit filter that holds answers to a matcher's grammar.

    Several answers can be generated at once: `for_answer` makes a filter for each.

    Args:
        matcher: llguidance's matcher at the beginning of a grammar.
        what: name of the grammar in messages.
    """

    def __init__(self, matcher: Any, what: str) -> None:
        self._beginning = matcher
        self._what = what
        self._answer = self.for_answer()

    def for_answer(self) -> _Matched:
        """Make a filter for a single answer, which keeps its place in the grammar."""
        return _Matched(self._beginning.deep_copy(), self._what)

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Set the logits `[V]` of impossible tokens to -inf, in place.

        Args:
            tokens: tokens of the answer so far; a new answer begins if they do not continue the
                earlier ones.

        Raises:
            OptionError: the grammar allows no next token.
        """
        if not self._answer.goes_on(tokens):
            self._answer = self.for_answer()
        self._answer(logits, tokens)


class GrammarFilter(MatcherFilter):
    """A logit filter that holds answers to a grammar.

    Args:
        grammars: grammars of the model, or its tokenizer, to make them of.

    Raises:
        OptionError: llguidance cannot be imported, or the grammar is wrong.

    Attributes:
        grammar: the grammar as it was given.
    """

    def __init__(self, grammars: Grammars | Tokenizer, grammar: Grammar) -> None:
        if isinstance(grammars, Tokenizer):
            grammars = Grammars(grammars)
        super().__init__(grammars.matcher_of(grammar), grammar.name)
        self.grammar = grammar


class JsonFilter(GrammarFilter):
    """A logit filter for documents of a JSON schema.

    Args:
        grammars: grammars of the model, or its tokenizer, to make them of.
        schema: a JSON schema as text; `{}` allows any JSON.

    Raises:
        OptionError: llguidance cannot be imported, or the schema is wrong.
    """

    def __init__(self, grammars: Grammars | Tokenizer, schema: str) -> None:
        super().__init__(grammars, Grammar("json_schema", schema))


class _Matched:
    """The place of one answer in a grammar."""

    def __init__(self, matcher: Any, what: str) -> None:
        self._matcher = matcher
        self._what = what
        self._read: list[int] = []

    def goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with the tokens read before."""
        return list(tokens[: len(self._read)]) == self._read

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Set the logits `[V]` of impossible tokens to -inf, in place.

        Args:
            tokens: tokens of the answer so far, beginning with those read before.

        Raises:
            OptionError: the grammar allows no next token.
        """
        new = list(tokens[len(self._read) :])
        try:
            self._matcher.consume_tokens(new)
            mask = self._matcher.compute_bitmask()
        except BaseException as error:  # a panic of Rust's is no Exception to Python
            if type(error).__name__ != "PanicException":
                raise
            raise OptionError(f"{self._what} cannot be followed: {error}") from None
        self._read += new
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[0]].astype(np.bool_)
        problem = self._matcher.get_error()  # with an error, the end alone is allowed
        if problem or not allowed.any():
            raise OptionError(
                f"{self._what} allows nothing after the {len(tokens)} tokens of the answer so "
                f"far{problem and f' ({problem.splitlines()[0]})'}; loosen it"
            )
        logits[: allowed.shape[0]][~allowed] = -np.inf
        logits[allowed.shape[0] :] = -np.inf


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            f"schemas, grammars and tools need llguidance, which cannot be imported ({error}); "
            "install it with: pip install llguidance"
        ) from None
    return llguidance
