"""Logit filters for answers that follow a grammar, such as JSON of a schema.

The grammar engine `llguidance` finds at each step which tokens can still lead to a valid
document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import OptionError
from edgellm.text.tokenizer import Tokenizer

# Bounded, because a model may otherwise write spaces for ever.
WHITESPACE = r"[ \n]{0,12}"
# Where a message of llguidance begins to list the grammar, which may have thousands of lines.
_LISTING = re.compile(r"\n +\d+ \| ")


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

    def filter(self, schema: str) -> JsonFilter:
        """Make a logit filter for JSON of a schema; see `JsonFilter`."""
        return JsonFilter(self, schema)

    def schema_matcher(self, schema: str) -> Any:
        """Make llguidance's matcher for JSON of a schema, at the beginning of a document.

        Raises:
            OptionError: the schema is wrong, or uses a feature that llguidance does not support.
        """
        try:
            json.loads(schema)
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": WHITESPACE}
            )
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
        matcher = self._llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if problem := matcher.get_error():
            problem = _LISTING.split(problem)[0]
            raise OptionError(f"{what} cannot be used: {problem}")
        return matcher


class GrammarFilter:
    """A logit filter that holds answers to a grammar.

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


class JsonFilter(GrammarFilter):
    """A logit filter for documents of a JSON schema.

    Args:
        grammars: grammars of the model, or its tokenizer, to make them of.
        schema: a JSON schema as text; `{}` allows any JSON.

    Raises:
        OptionError: llguidance cannot be imported, or the schema is wrong.

    Attributes:
        schema: the JSON schema as it was given.
    """

    def __init__(self, grammars: Grammars | Tokenizer, schema: str) -> None:
        if isinstance(grammars, Tokenizer):
            grammars = Grammars(grammars)
        super().__init__(grammars.schema_matcher(schema), "the JSON schema")
        self.schema = schema


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
            f"a JSON schema needs llguidance, as tools do, which cannot be imported ({error}); "
            "install it with: pip install llguidance"
        ) from None
    return llguidance
