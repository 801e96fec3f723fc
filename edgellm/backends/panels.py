"""The weights of the native kernels in a bundle: all linear layers in panels, and the norms."""

from __future__ import annotations

from edgellm.graphs.checkpoint import shapes
from edgellm.kernels.linear import Panels
from edgellm.kernels.quantized import KINDS
from edgellm.kernels.step import LayerWeights, Weights
from edgellm.store.bundle import PANELS, Bundle, map_arrays

# The linear layers of a layer, in the order in which a token needs them.
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


def open_panels(bundle: Bundle) -> Weights:
    """Map the weights; pages are read when they are used."""
    config = bundle.config
    entry = bundle.flavour(PANELS)
    arrays = map_arrays(bundle.path, entry.arrays)
    sizes = shapes(config)

    def panels(name: str) -> Panels:
        outputs, inputs = sizes[name]
        return Panels(arrays[name], outputs, inputs, KINDS[entry.kinds[name]])

    def layer(index: int) -> LayerWeights:
        prefix = f"layers.{index}."
        return LayerWeights(
            attention_norm=arrays[prefix + "attention_norm"],
            mlp_norm=arrays[prefix + "mlp_norm"],
            qkv_bias=arrays.get(prefix + "qkv_bias"),
            **{name: panels(prefix + name) for name in LINEAR},
        )

    embedding = panels("embedding")
    return Weights(
        layers=[layer(i) for i in range(config.layers)],
        final_norm=arrays["final_norm"],
        embedding=embedding,
        head=embedding if config.tied_embedding else panels("head"),
        heads=config.heads,
        window=config.sliding_window,
        epsilon=config.rms_norm_eps,
    )
