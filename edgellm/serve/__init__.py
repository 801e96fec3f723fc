"""`edgellm serve`: the HTTP dialects of the clients that people use, over the models' loops."""

from edgellm.serve.application import create_app
from edgellm.serve.model_pool import ModelPool, ServedModel, served_model
from edgellm.serve.options import ServeOptions
from edgellm.serve.server import serve

__all__ = ["ModelPool", "ServeOptions", "ServedModel", "create_app", "serve", "served_model"]
