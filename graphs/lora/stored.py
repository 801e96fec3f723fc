"""An adapter as its file has it, and its changes of linear layers under canonical names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.errors import EdgeLLMError, ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import (
    GGUF_FUSED_QKV,
    LATENT_UPS,
    Architecture,
    architecture,
    model_type_of,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Attention, LayerConfig, Mixer
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.state_mixers import DeltaNet
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import TensorSpec, layer_tensors
from edgellm.graphs.translation import Translation
from edgellm.kernels.lora import CHANGED, AdapterWeights, LowRank, pack_adapter

# Linear layers in `tensors.py` that have another name in `CHANGED`.
_KERNEL_NAMES = {"q_up": "q", "q_down": "query_down"}
_ALLOWED = "projections of attention and of other mixers, MLPs, and experts that all tokens use"
# Prefixes of text models, and of those within multimodal ones, before the layers' names.
_PREFIX = re.compile(
    r"(?:model\.(?:language_model\.|text_model\.)?|language_model\.model\.)?layers\."
)


@dataclass(frozen=True)
class StoredChange:
    """Change of a matrix of the file's model: `scale * b a`.

    Attributes:
        a: `[rank, inputs]`.
        b: `[outputs, rank]`.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class StoredAdapter:
    """Adapter on disk.

    Attributes:
        origin: name of the file in errors.
        architecture: `general.architecture` of a GGUF file; None: a file of another format, whose
            names are those of Hugging Face.
        changes: changes by the names of the matrices in files of the model.
        invocation: tokens whose last occurrence in a prompt is where the adapter begins (activated
            LoRA, arXiv:2504.12397); empty: it changes all tokens.
    """

    origin: str
    architecture: str | None
    changes: Mapping[str, StoredChange]
    invocation: tuple[int, ...] = ()


def invocation_of(fields: Fields, key: str) -> tuple[int, ...]:
    """Return the tokens at which an adapter begins, see `StoredAdapter`.

    Raises:
        ModelFormatError: they are no list of token ids.
    """
    tokens = fields.optional(list, key) or []
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelFormatError(f"{fields.origin}: {key} is {tokens!r:.100}; token ids are expected")
    return tuple(tokens)


def hf_name(module: str) -> str:
    """Return the name of a module's weight in a text model's own folder."""
    return _PREFIX.sub("model.layers.", module, count=1) + ".weight"


def changes_of(adapter: StoredAdapter, config: ModelConfig) -> list[dict[str, LowRank]]:
    """Return the changes of each layer of a model, with the names and rows of `tensors.py`.

    Raises:
        ModelFormatError: a matrix does not fit the model, or is damaged.
        UnsupportedModelError: the adapter is for another architecture, or changes a part of the
            model that an adapter cannot change here.
    """
    try:
        return _Reader(adapter, config).layers()
    except EdgeLLMError as error:
        if adapter.origin in str(error):
            raise
        raise type(error)(f"{adapter.origin}: {error}") from None


def pack_changes(layers: Sequence[Mapping[str, LowRank]]) -> AdapterWeights:
    """Pack the changes of each layer for the kernels; see `pack_adapter`."""
    return pack_adapter(
        [{_KERNEL_NAMES.get(name, name): each for name, each in layer.items()} for layer in layers]
    )


class _Reader:
    def __init__(self, adapter: StoredAdapter, config: ModelConfig) -> None:
        self._adapter, self._config = adapter, config
        gguf, family = adapter.architecture is not None, _family(adapter, config)
        fused = gguf and any(".attn_qkv." in name for name in adapter.changes)
        fold = family.gguf_fold if gguf else family.hf_fold
        names = family.gguf_names if gguf else family.hf_names
        # files in GGUF are multiplied already; else a fold says what it misses
        settings = Fields(
            {} if gguf else config.settings,
            origin="settings of the model's own folder, which an adapter's has not, nor a bundle "
            "of a GGUF file or of an earlier edgellm",
        )
        self._translation = Translation(
            config=config,
            names={**names, **GGUF_FUSED_QKV} if fused else names,
            interleaved=family.gguf_interleaved_rope if gguf else family.hf_interleaved_rope,
            stored=lambda name: adapter.changes[name].b,
            fold=lambda name, b: b if fold is None else fold(name, b, settings),
        )

    def layers(self) -> list[dict[str, LowRank]]:
        used: set[str] = set()
        layers: list[dict[str, LowRank]] = []
        for index in range(self._config.layer_count):
            changes: dict[str, LowRank] = {}
            for spec in layer_tensors(self._config, index):
                if spec.role != "linear":
                    continue
                canonical = f"layers.{index}.{spec.name}"
                names = self._adapter.changes.keys() & set(self._translation.names_of(canonical))
                if names:
                    self._refuse_part(min(names), spec, self._config.layers[index])
                for name in names:
                    changes[spec.name] = self._change(canonical, name, spec.shape)
                    used.add(name)
            layers.append(changes)
        self._refuse_others(used)
        return layers

    def _change(self, canonical: str, name: str, shape: tuple[int, ...]) -> LowRank:
        """Return the change of one linear layer, of a matrix that may have the rows of several."""
        stored = self._adapter.changes[name]
        part = canonical.rpartition(".")[2]
        if part in LATENT_UPS:
            attention = self._config.layers[int(canonical.split(".")[1])].attention
            return _latent_up(name, stored, attention, keys=part == "key_up")
        ranks = stored.a.shape[:1], stored.b.shape[1:]
        b = self._translation.tensor(canonical) if len(stored.b.shape) == 2 else stored.b
        if ranks[0] != ranks[1] or (*b.shape[:1], *stored.a.shape[1:]) != shape or 0 in ranks[0]:
            raise ModelFormatError(
                f"the adapter is for another model: {name} has A {list(stored.a.shape)} and B "
                f"{list(stored.b.shape)}, and this model's {canonical} is {list(shape)}"
            )
        return LowRank(stored.a.float32(), stored.scale * b.float32())

    def _refuse_others(self, used: set[str]) -> None:
        others = sorted(self._adapter.changes.keys() - used)
        if others:
            raise UnsupportedModelError(
                f"the adapter changes {others[0]}, which is no linear layer of this model "
                f"({self._config.model_type}, {self._config.layer_count} layers); adapters can "
                f"change {_ALLOWED}"
            )

    def _refuse_part(self, name: str, spec: TensorSpec, layer: LayerConfig) -> None:
        """Refuse a matrix that no adapter can change.

        Raises:
            UnsupportedModelError: it is one of an expert, of a part beside the mixer and the MLP,
                or has another order in files of the adapter's format.
        """
        mixer, gguf = layer.mixer, self._adapter.architecture is not None
        if spec.experts is not None:
            part = "a matrix of an expert"
        elif _KERNEL_NAMES.get(spec.name, spec.name) not in CHANGED:
            part = "neither of the mixer nor of the MLP"
        elif spec.name in LATENT_UPS and isinstance(self._translation.names[spec.name], str):
            part = "a matrix of each head of latents by itself"
        elif _has_other_order(spec, mixer, gguf=gguf):
            part = "a matrix of a delta net, whose heads have another order in folders than in GGUF"
        else:
            return
        raise UnsupportedModelError(
            f"the adapter changes {name}, which is {part}; adapters can change {_ALLOWED}. Merge "
            "it into the weights before the export"
        )


def _has_other_order(spec: TensorSpec, mixer: Mixer, *, gguf: bool) -> bool:
    """Whether the order of a delta net's heads depends on the format of a file."""
    if not isinstance(mixer, DeltaNet) or mixer.key_heads == mixer.value_heads:
        return False
    return (gguf or mixer.tiled) and (spec.name.startswith("delta_") or spec.name == "o")


def _latent_up(name: str, stored: StoredChange, attention: Attention, *, keys: bool) -> LowRank:
    """Return the change of what makes keys, or values, of latents, for each head by itself.

    A row of B belongs to a key's or a value's number of a head, and A reads latents. Queries go
    through the matrix of keys from its other side.

    Raises:
        ModelFormatError: the matrices do not fit the model.
    """
    latent, heads = attention.latent, attention.heads
    assert latent is not None
    rank = (*stored.a.shape, 0)[0]
    needed = [(rank, latent.rank), (heads * (latent.key + latent.value), rank)]
    if [stored.a.shape, stored.b.shape] != needed or rank == 0:
        raise ModelFormatError(
            f"the adapter is for another model: {name} has A {list(stored.a.shape)} and B "
            f"{list(stored.b.shape)}, and this model's are {[list(shape) for shape in needed]}"
        )
    a, b = stored.a.float32(), stored.scale * stored.b.float32().reshape(heads, -1, rank)
    if keys:
        return LowRank(np.ascontiguousarray(b[:, : latent.key].swapaxes(1, 2)), a.T)
    return LowRank(a, np.ascontiguousarray(b[:, latent.key :]))


def _family(adapter: StoredAdapter, config: ModelConfig) -> Architecture:
    """Return the architecture whose files have the adapter's names.

    Raises:
        UnsupportedModelError: the adapter is for another architecture.
    """
    if adapter.architecture is None:
        return architecture(config.model_type, gguf=False, origin=adapter.origin)
    family = architecture(adapter.architecture, gguf=True, origin=adapter.origin)
    if model_type_of(adapter.architecture, gguf=True) == config.model_type:
        return family
    own = architecture(config.model_type, gguf=False, origin=adapter.origin)
    if own.config_from_gguf is not None or adapter.architecture != "llama":
        raise UnsupportedModelError(
            f"the adapter is for the architecture {adapter.architecture!r}, and the model is "
            f"{config.model_type!r}"
        )
    return family  # of a family whose GGUF files say `llama`, such as Mistral


def matrices(
    weights: SafetensorsFolder, key: re.Pattern[str], *, parts: str, origin: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two matrices of each module in a folder of adapters.

    Args:
        key: pattern of a tensor's key, with the groups `module` and `part`.
        parts: names of the two parts, one letter each.
        origin: name of the file in errors.

    Raises:
        ModelFormatError: a module lacks one of the two.
        UnsupportedModelError: a tensor is no such matrix.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for name in weights.keys:
        match = key.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(f"{origin}: tensor {name} is no matrix of a LoRA adapter")
        pairs.setdefault(match["module"], {})[match["part"]] = weights.tensor(name)
    a, b = parts[0], parts[1]
    for module, each in pairs.items():
        if len(each) != len(parts):
            raise ModelFormatError(f"{origin}: {module} has not both lora_{a} and lora_{b}")
    return {module: (each[a], each[b]) for module, each in pairs.items()}
