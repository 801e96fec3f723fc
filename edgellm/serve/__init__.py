"""`edgellm serve`: an HTTP server that speaks several API dialects over the models' loops.

Every name but `ServeOptions` is imported when it is first used, and with it starlette and uvicorn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.serve.options import ServeOptions

if TYPE_CHECKING:
    from edgellm.serve.application import create_app
    from edgellm.serve.model_pool import ModelPool
    from edgellm.serve.served import ServedModel, served_model, split_id
    from edgellm.serve.server import serve

_LAZY = {
    "ModelPool": "edgellm.serve.model_pool",
    "ServedModel": "edgellm.serve.served",
    "create_app": "edgellm.serve.application",
    "serve": "edgellm.serve.server",
    "served_model": "edgellm.serve.served",
    "split_id": "edgellm.serve.served",
}

__all__ = [
    "ModelPool",
    "ServeOptions",
    "ServedModel",
    "create_app",
    "serve",
    "served_model",
    "split_id",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'edgellm.serve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
