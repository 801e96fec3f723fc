"""edgellm on Ray: replicas that serve a model on many machines, and Ray Data pipelines.

    serve run edgellm.ray:application model=smollm2-135m-instruct threads=4 replicas=2

No other part of edgellm imports Ray. Install:
`pip install "ray[data,serve]" starlette uvicorn llguidance`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.ray.arguments import Arguments
    from edgellm.ray.batch_inference import BatchInference
    from edgellm.ray.deployments import application

# Imported when first used: Ray Data's workers need neither Ray Serve nor a web server.
_LAZY = {
    "Arguments": "edgellm.ray.arguments",
    "BatchInference": "edgellm.ray.batch_inference",
    "application": "edgellm.ray.deployments",
}

__all__ = ["Arguments", "BatchInference", "application"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'edgellm.ray' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("edgellm"):
            raise
        raise ModuleNotFoundError(
            f"edgellm.ray needs {error.name}, which is not installed; install it with: "
            'pip install "ray[data,serve]" starlette uvicorn llguidance',
            name=error.name,
        ) from None
