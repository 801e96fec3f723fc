"""On-device LLM inference: static-chunk prefill, a quantized decode loop, one shared KV cache.

import edgellm

llm = edgellm.load("smollm2-135m-instruct")
print(llm.chat(temperature=0).send("Name the capital of France.").text)
"""

from typing import TYPE_CHECKING, Any

from edgellm.errors import (
    BundleError,
    CacheFullError,
    CancelledError,
    ContextOverflowError,
    EdgeLLMError,
    ExportError,
    MemoryEstimateError,
    ModelFormatError,
    NumericError,
    OptionError,
    ProviderError,
    SessionFileError,
    SourceError,
    TemplateError,
    TokenizerError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from edgellm.chat import Chat
    from edgellm.engine.adapters import AdapterSource
    from edgellm.engine.answer import LogitFilter
    from edgellm.engine.call import CallArguments, ChatCallArguments
    from edgellm.generation import BatchAnswer, BatchRequest
    from edgellm.generation_options import GenerationArguments, GenerationOptions
    from edgellm.infill import InfillArguments
    from edgellm.kernels.kv_blocks import KVFormat
    from edgellm.llm import LLM, LoadArguments, load
    from edgellm.options import EngineArguments, EngineOptions
    from edgellm.outline import Outline, OutlinePoint
    from edgellm.progress import Progress
    from edgellm.results import (
        Completion,
        Composition,
        Condensed,
        DraftCounts,
        FinishReason,
        Piece,
        Stats,
        TokenLogprob,
    )
    from edgellm.session import Session
    from edgellm.text.grammar import Grammar, JsonFilter
    from edgellm.text.prompt import Message
    from edgellm.tool_use import Tool, ToolArguments, ToolCall, ToolCallDelta, ToolChoice

__version__ = "0.1.0"

# Imported when first used: errors and version must not cost the import of numpy and tokenizers.
_LAZY = {
    "AdapterSource": "edgellm.engine.adapters",
    "BatchAnswer": "edgellm.generation",
    "BatchRequest": "edgellm.generation",
    "CallArguments": "edgellm.engine.call",
    "Chat": "edgellm.chat",
    "ChatCallArguments": "edgellm.engine.call",
    "Completion": "edgellm.results",
    "Composition": "edgellm.results",
    "Condensed": "edgellm.results",
    "DraftCounts": "edgellm.results",
    "EngineArguments": "edgellm.options",
    "EngineOptions": "edgellm.options",
    "FinishReason": "edgellm.results",
    "GenerationArguments": "edgellm.generation_options",
    "GenerationOptions": "edgellm.generation_options",
    "Grammar": "edgellm.text.grammar",
    "InfillArguments": "edgellm.infill",
    "JsonFilter": "edgellm.text.grammar",
    "KVFormat": "edgellm.kernels.kv_blocks",
    "LLM": "edgellm.llm",
    "LoadArguments": "edgellm.llm",
    "LogitFilter": "edgellm.engine.answer",
    "Message": "edgellm.text.prompt",
    "Outline": "edgellm.outline",
    "OutlinePoint": "edgellm.outline",
    "Piece": "edgellm.results",
    "Progress": "edgellm.progress",
    "Session": "edgellm.session",
    "Stats": "edgellm.results",
    "TokenLogprob": "edgellm.results",
    "Tool": "edgellm.tool_use",
    "ToolArguments": "edgellm.tool_use",
    "ToolCall": "edgellm.tool_use",
    "ToolCallDelta": "edgellm.tool_use",
    "ToolChoice": "edgellm.tool_use",
    "load": "edgellm.llm",
}

__all__ = [
    "LLM",
    "AdapterSource",
    "BatchAnswer",
    "BatchRequest",
    "BundleError",
    "CacheFullError",
    "CallArguments",
    "CancelledError",
    "Chat",
    "ChatCallArguments",
    "Completion",
    "Composition",
    "Condensed",
    "ContextOverflowError",
    "DraftCounts",
    "EdgeLLMError",
    "EngineArguments",
    "EngineOptions",
    "ExportError",
    "FinishReason",
    "GenerationArguments",
    "GenerationOptions",
    "Grammar",
    "InfillArguments",
    "JsonFilter",
    "KVFormat",
    "LoadArguments",
    "LogitFilter",
    "MemoryEstimateError",
    "Message",
    "ModelFormatError",
    "NumericError",
    "OptionError",
    "Outline",
    "OutlinePoint",
    "Piece",
    "Progress",
    "ProviderError",
    "Session",
    "SessionFileError",
    "SourceError",
    "Stats",
    "TemplateError",
    "TokenLogprob",
    "TokenizerError",
    "Tool",
    "ToolArguments",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "UnsupportedModelError",
    "__version__",
    "load",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
