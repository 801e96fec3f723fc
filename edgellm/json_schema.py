"""Answers that are JSON of a given schema, by ruling out tokens that would break it.

The grammar engine is `llguidance` (the extra `edgellm[json]`); it tells at each step which tokens
can still lead to a valid document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import OptionError
from edgellm.tokenizer import Tokenizer

# Without a bound, a model may go on with spaces for ever.
_WHITESPACE = r"[ \n]{0,12}"


class JsonFilter:
    """A logit filter for one answer.

    Args:
        schema: a JSON schema as text; `{}` allows any JSON.

    Raises:
        OptionError: llguidance is not installed, or the schema is wrong.
    """

    def __init__(self, tokenizer: Tokenizer, schema: str) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise OptionError(
                'a JSON schema needs llguidance; install it with: pip install "edgellm[json]"'
            ) from None
        try:
            parsed = json.loads(schema)
        except ValueError as error:
            raise OptionError(f"the JSON schema is not JSON: {error}") from None
        vocabulary = llguidance.LLTokenizer(
            tokenizer.to_json(), eos_token=sorted(tokenizer.eos_ids)
        )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                parsed, overrides={"whitespace_pattern": _WHITESPACE}
            )
        except ValueError as error:
            raise OptionError(f"the JSON schema cannot be used: {error}") from None
        self._matcher = llguidance.LLMatcher(vocabulary, grammar)
        if problem := self._matcher.get_error():
            raise OptionError(f"the JSON schema cannot be used: {problem}")
        self._seen = 0

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Set the logits `[V]` of impossible tokens to -inf, in place."""
        self._matcher.consume_tokens(list(tokens[self._seen :]))
        self._seen = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[0]].astype(np.bool_)
        logits[: allowed.shape[0]][~allowed] = -np.inf
        logits[allowed.shape[0] :] = -np.inf
