"""The weights of the native kernels in a bundle: all linear layers in panels, and the norms."""

from __future__ import annotations

from edgellm.bundle import PANELS, Bundle, map_arrays
from edgellm.graphs.checkpoint import shapes
from edgellm.kernels.linear import Panels, kind_of
from edgellm.kernels.step import LayerWeights, Weights

# A layer of the kernels -> tensors of the checkpoint, on top of each other.
LINEAR = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate": ("gate",),
    "up": ("up",),
    "down": ("down",),
}


def open_panels(bundle: Bundle) -> Weights:
    """Map the weights; pages are read when they are used."""
    config = bundle.config
    arrays = map_arrays(bundle.path, bundle.flavour(PANELS).arrays)
    sizes = shapes(config)

    def panels(name: str, *parts: str) -> Panels:
        outputs = sum(sizes[part][0] for part in parts)
        data = arrays[name]
        return Panels(data, outputs, sizes[parts[0]][1], kind_of(data))

    def layer(index: int) -> LayerWeights:
        prefix = f"layers.{index}."
        linear = {
            name: panels(prefix + name, *(prefix + part for part in parts))
            for name, parts in LINEAR.items()
        }
        return LayerWeights(
            attention_norm=arrays[prefix + "attention_norm"],
            mlp_norm=arrays[prefix + "mlp_norm"],
            value_outputs=config.kv_size,
            qkv_bias=arrays.get(prefix + "qkv_bias"),
            **linear,
        )

    embedding = panels("embedding", "embedding")
    return Weights(
        layers=[layer(i) for i in range(config.layers)],
        final_norm=arrays["final_norm"],
        embedding=embedding,
        head=embedding if config.tied_embedding else panels("head", "head"),
        heads=config.heads,
        window=config.sliding_window,
        epsilon=config.rms_norm_eps,
    )
