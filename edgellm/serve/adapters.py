"""Adapters that a server serves as models of their own, each beside the model that it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.checks import check_flag
from edgellm.errors import OptionError
from edgellm.llm import LLM
from edgellm.serve.ask import Ask, EmbeddingAsk, RerankAsk
from edgellm.serve.request_error import RequestError
from edgellm.serve.served import ServedModel


@dataclass(frozen=True)
class ServedAdapter:
    """Adapter that clients may name as their model.

    Attributes:
        model: id of the model that it changes.
        path, scale: see `LLM.load_adapter`.
    """

    model: str
    path: str | Path
    scale: float = 1.0


class ServedAdapters:
    """Adapters by name, those of models that are not in memory too. For one event loop.

    Args:
        managed: whether clients may add and drop adapters.

    Raises:
        OptionError: an adapter has the id of a model or another adapter's name.
    """

    def __init__(self, models: Sequence[ServedModel], *, managed: bool = False) -> None:
        check_flag("manage_adapters", managed)
        self._managed = managed
        self._adapters: dict[str, ServedAdapter] = {}
        for model in models:
            for name, adapter in _from_start(model).items():
                if name in self._adapters or name in [each.id for each in models]:
                    raise OptionError(f"the name {name!r} of an adapter is taken; choose another")
                self._adapters[name] = adapter

    @property
    def all(self) -> Mapping[str, ServedAdapter]:
        """Adapters in the order in which they were named."""
        return self._adapters

    def get(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter that a client names as its model; None: it names none.

        A suffix `:latest`, which Ollama's clients add, is ignored.
        """
        if not name:
            return None
        return self._adapters.get(name) or self._adapters.get(name.removesuffix(":latest"))

    def check_managed(self) -> None:
        """Refuse changes by clients where the server does not allow them.

        Raises:
            RequestError: it does not.
        """
        if not self._managed:
            raise RequestError(
                "not_supported",
                "adapters are not changed over HTTP; name them when you start the server "
                "(`edgellm serve --lora NAME=PATH`), or start it with --manage-adapters",
            )

    def add(self, name: str, adapter: ServedAdapter) -> None:
        self._adapters[name] = adapter

    def remove(self, name: str) -> ServedAdapter | None:
        """Forget an adapter, and return it; None: there was none."""
        return self._adapters.pop(name, None)

    def forget(self, id: str) -> None:
        """Forget the adapters of a model that is served no longer."""
        for name, _ in self.of_model(id):
            self.remove(name)

    def opened(self, model: ServedModel) -> LLM:
        """Open a model with its adapters: without dropped ones, and with those that were added.

        Raises:
            EdgeLLMError: see `edgellm.load` and `LLM.load_adapter`.
        """
        llm, wanted, opened = model.open(), dict(self.of_model(model.id)), _from_start(model)
        for name in set(llm.adapters):
            if wanted.get(name) != opened.get(name):  # dropped since, or another one by now
                llm.unload_adapter(name)
        for name, each in wanted.items():
            if name not in llm.adapters:
                llm.load_adapter(name, each.path, scale=each.scale)
        return llm

    def name_of(self, ask: Ask | EmbeddingAsk | RerankAsk, model: str) -> str | None:
        """Return the name of the adapter that an ask wants; None: the model as it is.

        Args:
            model: id of the model.

        Raises:
            RequestError: the ask wants adapters by number that are not there, or several.
        """
        if isinstance(ask, Ask) and ask.lora is not None:
            return self._numbered(ask.lora, model)
        asked = self.get(ask.model)
        return next((name for name, each in self._adapters.items() if each is asked), None)

    def of_model(self, id: str) -> list[tuple[str, ServedAdapter]]:
        """Return the adapters of a model; llama.cpp's clients name them by their place here."""
        return [(name, each) for name, each in self._adapters.items() if each.model == id]

    def _numbered(self, lora: Sequence[tuple[int, float]], model: str) -> str | None:
        adapters, asked = self.of_model(model), [each for each in lora if each[1]]
        if not asked:
            return None
        if not adapters:
            raise RequestError(
                "not_supported", "`lora`: no adapters are served; leave it out", param="lora"
            )
        (number, scale), *others = asked
        if others or not 0 <= number < len(adapters):
            raise RequestError(
                "invalid_request",
                f"`lora` asks for {len(asked)} adapters, the first is {number}; one is allowed, of "
                f"0 to {len(adapters) - 1}",
                param="lora",
            )
        name, adapter = adapters[number]
        if scale != adapter.scale:
            raise RequestError(
                "invalid_request",
                f"`lora` asks for adapter {number} with scale {scale:g}; {name!r} is served with "
                f"{adapter.scale:g}",
                param="lora",
            )
        return name


def _from_start(model: ServedModel) -> dict[str, ServedAdapter]:
    """Return the adapters that a model is opened with."""
    adapters = {}
    for name, source in model.adapters.items():
        path, scale = source if isinstance(source, tuple) else (source, 1.0)
        adapters[name] = ServedAdapter(model.id, path, scale)
    return adapters
