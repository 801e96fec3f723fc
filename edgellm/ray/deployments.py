"""The server's application on Ray Serve: a front, replicas that answer, and perhaps others that
compute prompts.

    serve run edgellm.ray:application model=MODEL threads=4 replicas=2 prefill_replicas=1

Clients are connected to Ray Serve's proxy, and this to the front, which has no model: it checks and
reads a request and chooses its replica by what its prompt begins with.
"""
# Ray Serve reads the type of the builder's argument, so annotations are not to be texts here.

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.applications import Starlette

from edgellm.ray.arguments import Arguments
from edgellm.ray.forwarding import ForwardedRequest, Message, answered, front_app
from edgellm.ray.prefill import PrefillReplica, RemotePrefill
from edgellm.ray.router import PrefixRouter
from edgellm.serve.application import create_app
from edgellm.serve.model_pool import ModelPool, served_model
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError

# A model that cannot be loaded cannot be loaded the next time, mostly.
_STARTS = 3


class Front:
    """Lets requests in, and has replicas answer them.

    Args:
        replicas: a handle of their deployment.
    """

    def __init__(self, replicas: Any, options: ServeOptions) -> None:
        self._replicas = replicas.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve."""
        return front_app(self._answered, self._options)

    async def _answered(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        answer = self._replicas.answer.remote(request)
        try:
            async for messages in answer:
                yield messages
        except BackPressureError:
            raise RequestError(
                "overloaded", "all replicas have as many requests as they may", retry_after_s=1
            ) from None
        except (DeploymentUnavailableError, RayActorError):
            raise RequestError(
                "unavailable", "the replica is gone; try again", retry_after_s=1
            ) from None
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone
            answer.cancel()
            raise


class Replica:
    """One model, loaded once, behind the server's application.

    Args:
        prefill: a handle of the deployment that computes prompts; None: it does so itself.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, arguments: Arguments, prefill: Any = None
    ) -> None:
        pool = ModelPool([served_model(arguments.model, arguments.engine_arguments)])
        remote = None
        if prefill is not None:
            remote = RemotePrefill(
                prefill,
                min_tokens=arguments.prefill_min_tokens,
                timeout_s=arguments.prefill_timeout_s,
            )
        self._app = create_app(pool, arguments.serve_options, bring_prefix=remote)
        await pool.start()

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of an answer, as they come."""
        async for messages in answered(self._app, request):
            yield messages


def application(arguments: Arguments) -> Any:
    """An application for `serve.run`, `serve run` and Ray Serve's config files."""
    options = arguments.serve_options
    prefill = None
    if arguments.prefill_replicas:
        prefill = _deployment(PrefillReplica, arguments, arguments.prefill_replicas).bind(
            arguments.model, arguments.engine_arguments, arguments.hand_over_bytes
        )
    replicas = _deployment(Replica, arguments, arguments.replicas).bind(arguments, prefill)
    most = 2 * (arguments.replicas + 1) * options.max_waiting
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.grace_s,
        max_ongoing_requests=most,
        max_queued_requests=most,
    )
    return front.bind(replicas, options)


def _deployment(replica: type, arguments: Arguments, count: int) -> Any:
    """So many replicas with as many CPUs as they have threads, chosen by prefix."""
    options = arguments.serve_options
    return serve.deployment(
        replica,
        name=replica.__name__,
        num_replicas=count,
        ray_actor_options={"num_cpus": arguments.threads},
        graceful_shutdown_timeout_s=options.grace_s,
        max_ongoing_requests=options.max_waiting,
        max_queued_requests=options.max_waiting,
        max_constructor_retry_count=_STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"most_ahead": arguments.most_ahead},
        ),
    )
