"""Every error that edgellm raises for something outside its own code.

A message says what was asked, what is allowed and what to do.
"""

from __future__ import annotations


class EdgeLLMError(ValueError):
    """Base of all errors that a user can cause or mend."""


class SourceError(EdgeLLMError):
    """A model name that cannot be resolved or downloaded."""


class ModelFormatError(EdgeLLMError):
    """A model file that is missing, damaged, foreign or does not fit its config."""


class UnsupportedModelError(EdgeLLMError):
    """A well-formed model that this version cannot run."""


class BundleError(EdgeLLMError):
    """A bundle that is damaged, truncated, foreign or incomplete."""


class ExportError(EdgeLLMError):
    """An export that could not be finished; it has left no files behind."""


class TokenizerError(EdgeLLMError):
    """Text or a vocabulary that cannot be tokenized."""


class TemplateError(EdgeLLMError):
    """A chat template that is broken, unsafe or exceeds its size or time limit."""


class OptionError(EdgeLLMError):
    """An option with a value that is not allowed."""


class ContextOverflowError(EdgeLLMError):
    """More tokens than the context holds."""


class CacheFullError(EdgeLLMError):
    """A shared pool of KV blocks without a free block."""


class MemoryEstimateError(EdgeLLMError):
    """A model and context that would not fit into the memory that is available."""


class ProviderError(EdgeLLMError):
    """An execution provider that is missing or does not take a whole segment."""


class SessionFileError(EdgeLLMError):
    """A saved session that is damaged, or does not fit this model."""


class NumericError(EdgeLLMError):
    """NaN or infinite logits of the model."""


class CancelledError(Exception):
    """A stop that the caller asked for; the session stays as it was before the step."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
