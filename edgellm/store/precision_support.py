"""Support of models by precisions and back ends: the one table of what each of them lacks.

The C++ kernels compute all parts. The runtime, which has no exporter, asks here as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.errors import BundleError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig
from edgellm.store.bundle import read_manifest, write_manifest
from edgellm.store.home import delete_abandoned, delete_folder, locked
from edgellm.store.manifest import Manifest
from edgellm.store.reference import FOLDER as REFERENCE

# Precisions around a rotated residual stream (see `export/rotated.py`).
ROTATED = ("w8a8", "w8a16-qdq", "w8a8-qdq")
# Precisions with static scales, calibrated without a sequence's first tokens: the host has those.
STATIC = ("w8a16-qdq", "w8a8-qdq")
# Precisions of chunks between which the C++ kernels may compute a part.
_BESIDE_HOST = ("f32", "f16", "w4a16", "w8a8")
# Graphs without C++ kernels beside them, and back ends that decode in graphs.
_ALONE = (*STATIC, "int4", "portable", "reference", "chunked")
_WITHOUT_HOST = (*_ALONE, "cuda")
_NO_TRITON = (*_BESIDE_HOST, *_WITHOUT_HOST)
_ALL = (*_NO_TRITON, "triton")
# Precision names, or a function that returns the names suiting a model's config.
Precisions = Iterable[str] | Callable[[ModelConfig], Iterable[str]]


@dataclass(frozen=True)
class Part:
    """Part of a model that some precisions or back ends lack.

    Attributes:
        name: name in "it has ...".
        there: whether a model has the part.
        lacking: names of the precisions and back ends that lack it.
        why: reason, unless it is that there is no code for it.
    """

    name: str
    there: Callable[[ModelConfig], bool]
    lacking: Collection[str]
    why: str = ""


def _layer(there: Callable[[LayerConfig], bool]) -> Callable[[ModelConfig], bool]:
    return lambda config: any(map(there, config.layers))


def _attention(there: Callable[[Attention], bool]) -> Callable[[ModelConfig], bool]:
    return lambda config: any(map(there, config.attentions.values()))


PARTS = (
    Part("experts", _layer(lambda x: x.experts is not None), _WITHOUT_HOST),
    Part(
        "an MLP beside experts", _layer(lambda x: bool(x.shared and x.shared.beside)), _WITHOUT_HOST
    ),
    Part(
        "a clamped SwiGLU without experts",
        _layer(lambda x: x.mlp.activation == "clamped_swiglu" and x.experts is None),
        _NO_TRITON,
    ),
    Part("layers with states", lambda config: config.has_states, _WITHOUT_HOST),
    Part("a mixer beside attention", _layer(lambda x: x.beside is not None), _WITHOUT_HOST),
    Part("attention sinks", _attention(lambda x: x.sinks), _WITHOUT_HOST),
    Part("gates of attention", _attention(lambda x: x.output_gate), _WITHOUT_HOST),
    Part("layers that share K and V", _attention(lambda x: x.kv_from is not None), _WITHOUT_HOST),
    Part(
        "attention over latents (MLA)",
        _attention(lambda x: x.latent is not None),
        _WITHOUT_HOST,
    ),
    Part("K and V of another model", lambda config: config.backbone is not None, _ALL),
    Part("norms of V", _attention(lambda x: x.v_norm), _WITHOUT_HOST),
    Part("V made of K", _attention(lambda x: x.k_as_v), _WITHOUT_HOST),
    Part("scaled layers", _layer(lambda x: x.scaled), _WITHOUT_HOST),
    Part(
        "several residual streams (AltUp)",
        lambda config: config.streams is not None,
        _WITHOUT_HOST,
    ),
    Part(
        "products beside attention (LAuReL)",
        _layer(lambda x: x.laurel is not None),
        _WITHOUT_HOST,
    ),
    Part("gates above a cutoff", _layer(lambda x: x.mlp.cutoff is not None), _WITHOUT_HOST),
    Part(
        "embeddings for each layer",
        lambda config: config.layer_embedding is not None,
        _WITHOUT_HOST,
    ),
    Part("layers that differ in heads or width", lambda x: not x.has_equal_heads, ("cuda",)),
    Part(
        "norms of what attention and MLP add to the residual",
        _layer(lambda x: x.norms_outputs),
        ROTATED,
        "their weights do not commute with rotating it",
    ),
    Part(
        "layer norms",
        lambda config: config.norm == "layer",
        ROTATED,
        "they take a mean from the residual, which does not commute with rotating",
    ),
)
# Parts that Triton has computed in its interpreter alone, never on a GPU.
UNTRIED = (
    Part("layers with states", lambda config: config.has_states, ("triton",)),
    Part("gates of attention", _attention(lambda x: x.output_gate), ("triton",)),
    Part("attention sinks", _attention(lambda x: x.sinks), ("triton",)),
    Part("attention over latents (MLA)", _attention(lambda x: x.latent is not None), ("triton",)),
    Part("layers that share K and V", _attention(lambda x: x.kv_from is not None), ("triton",)),
    Part("norms of V", _attention(lambda x: x.v_norm), ("triton",)),
    Part("V made of K", _attention(lambda x: x.k_as_v), ("triton",)),
    Part("scaled layers", _layer(lambda x: x.scaled), ("triton",)),
    Part("embeddings for each layer", lambda x: x.layer_embedding is not None, ("triton",)),
    Part("several residual streams (AltUp)", lambda x: x.streams is not None, ("triton",)),
    Part("products beside attention (LAuReL)", _layer(lambda x: x.laurel is not None), ("triton",)),
    Part("gates above a cutoff", _layer(lambda x: x.mlp.cutoff is not None), ("triton",)),
    Part("layers that differ in heads or width", lambda x: not x.has_equal_heads, ("triton",)),
    Part("experts with biases", _layer(lambda x: bool(x.experts and x.mlp.bias)), ("triton",)),
    Part("shared experts", _layer(lambda x: x.shared is not None), ("triton",)),
    Part(
        "routers with sigmoids, biases, groups or factors",
        _layer(lambda x: x.experts is not None and not x.experts.is_plain),
        ("triton",),
    ),
)


def names_of(precisions: Precisions, config: ModelConfig) -> list[str]:
    """Return the names of the precisions for a model, each once, in alphabetical order."""
    return sorted(set(precisions(config) if callable(precisions) else precisions))


def why_not(name: str, config: ModelConfig) -> str | None:
    """Return why a precision or back end cannot compute a model, for an error; None if it can."""
    lacking = [part for part in PARTS if name in part.lacking and part.there(config)]
    if not lacking:
        return None
    reasons = "; ".join(part.why for part in lacking if part.why)
    return f"it has {_listed(lacking)}, which {name} does not compute{reasons and f': {reasons}'}"


def why_untried(name: str, config: ModelConfig) -> str | None:
    """Return why `auto` does not take a back end that can compute a model; None if it may."""
    untried = [part for part in UNTRIED if name in part.lacking and part.there(config)]
    if not untried:
        return None
    return f"it has {_listed(untried)}, which {name} never computed on a device; ask for it by name"


def _listed(parts: Sequence[Part]) -> str:
    *others, last = (part.name for part in parts)
    return f"{', '.join(others)} and {last}" if others else last


def needs_host(config: ModelConfig) -> bool:
    """Whether a model has parts that the C++ kernels compute beside graphs, or alone."""
    return any("portable" in part.lacking and part.there(config) for part in PARTS)


def require(precision: str, config: ModelConfig, *, among: Sequence[str]) -> None:
    """Refuse a precision that cannot compute a model.

    Args:
        among: all available precisions; the error names those that can compute the model.

    Raises:
        UnsupportedModelError: the precision cannot compute the model.
    """
    reason = why_not(precision, config)
    if reason is not None:
        others = [other for other in among if why_not(other, config) is None]
        raise UnsupportedModelError(
            f"precision {precision} cannot compute {config.model_type}: {reason}. Take "
            f"{' or '.join([*others, '`prefill` and `decode` native'])}"
        )


def first_supported(precisions: Sequence[str], config: ModelConfig) -> str:
    """Return the first precision that can compute a model.

    Raises:
        UnsupportedModelError: no precision can.
    """
    usable = (precision for precision in precisions if why_not(precision, config) is None)
    precision = next(usable, precisions[0])
    require(precision, config, among=precisions)
    return precision


def remove_precisions(path: Path, precisions: Collection[str]) -> int:
    """Remove precisions from the bundle at `path`, and return the number of bytes freed.

    At every moment all files that the manifest lists exist for other readers.

    Raises:
        BundleError: the bundle lacks such a precision, or has no other.
    """
    with locked(path):
        delete_abandoned(path)  # leftovers of a process that was killed here
        manifest = read_manifest(path)
        unknown = sorted(set(precisions) - set(manifest.precisions))
        there_are = ", ".join(manifest.precisions)
        if unknown:
            raise BundleError(
                f"{path}: no precision {', '.join(unknown)} in this bundle; it has {there_are}"
            )
        smaller = _without(manifest, precisions)
        if not smaller.precisions:
            raise BundleError(
                f"{path}: {there_are} is all that this bundle has; remove the model as a whole"
            )
        write_manifest(path, smaller)
        gone = {name: manifest.files[name] for name in manifest.files.keys() - smaller.files.keys()}
        for folder in {name.partition("/")[0] for name in gone}:
            with contextlib.suppress(FileNotFoundError):
                delete_folder(path / folder)
        return sum(entry.bytes for entry in gone.values())


def _without(manifest: Manifest, precisions: Collection[str]) -> Manifest:
    left = {name: entry for name, entry in manifest.precisions.items() if name not in precisions}
    heads = {
        kind: head
        for kind, head in manifest.heads.items()
        if any(entry.head == kind for entry in left.values())
    }
    # only precisions with errors were compared with the reference
    reference = manifest.reference if any(entry.errors for entry in left.values()) else {}
    gone = {f"head-{kind}" for kind in manifest.heads.keys() - heads.keys()} | set(precisions)
    if manifest.reference and not reference:
        gone.add(REFERENCE)
    files = {n: entry for n, entry in manifest.files.items() if n.partition("/")[0] not in gone}
    return replace(manifest, precisions=left, heads=heads, reference=reference, files=files)
