"""The tokens that end an answer (end-of-generation tokens) of a checkpoint.

Many files name only one end token, and a chat model then talks on as the user. So end tokens are
recognized by their texts too, as in llama.cpp (src/llama-vocab.cpp, `special_eog_ids`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tokenizers import Tokenizer

# A plain token of this text is an HTML tag in some vocabularies; people write none of the other
# texts below.
_STRIKE = "</s>"
_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    _STRIKE,
    "<eos>",
)


def is_end_text(text: str) -> bool:
    """Whether a token of this text ends an answer, whatever type it has in the file."""
    return text in _TEXTS and text != _STRIKE


def end_tokens(tokenizer: Tokenizer, named: Iterable[str | None]) -> tuple[str, ...]:
    """Return the texts of the tokens that end an answer.

    Args:
        named: texts that the file names as end tokens; None and texts that the tokenizer lacks are
            left out.
    """
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    texts = [t for t in named if t is not None and tokenizer.token_to_id(t) is not None]
    ends = dict.fromkeys([*texts, *(t for t in _TEXTS if t in special)])
    return tuple(text for text in ends if not _goes_on(text, ends))


def _goes_on(text: str, ends: Collection[str]) -> bool:
    """Whether an answer goes on after the token `text`, by the other end tokens in `ends`."""
    if text == "<|end|>":  # ends a message; gpt-oss and Solar write several in one answer
        calls = "<|call|>" in ends or "<|calls|>" in ends
        return calls and ("<|return|>" in ends or "<|flush|>" in ends)
    return text == _STRIKE and "<|tool_response>" in ends  # plain text in Gemma 4
