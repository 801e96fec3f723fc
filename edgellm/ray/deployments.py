"""The application on Ray Serve: a front, replicas that answer, and optional prefill replicas.

    serve run edgellm.ray:application model=MODEL threads=4 replicas=2 prefill_replicas=1

Clients connect to Ray Serve's proxy, and the proxy to the front, which has no model. The front
checks and reads a request, and chooses its replica by the beginning of its prompt.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette

from edgellm.ray.arguments import Arguments
from edgellm.ray.forwarding import ForwardedRequest, Message, answered, front_app
from edgellm.ray.prefill import PrefillReplica, RemotePrefill
from edgellm.ray.prefix_routing import PrefixRouting
from edgellm.serve.application import create_app
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.options import ServeOptions
from edgellm.serve.request_error import RequestError
from edgellm.serve.served import served_model

# Maximum of attempts to start a replica: a model that fails to load mostly fails again.
_STARTS = 3


class Front:
    """The front of the application, which lets requests in and has replicas answer them.

    Args:
        replicas: handle of the deployment of replicas that answer.
        options: options of the server.
    """

    def __init__(self, replicas: Any, options: ServeOptions) -> None:
        self._replicas = replicas.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        """Build the front's ASGI application; called by Ray Serve."""
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
    """A replica that answers requests: the server's application with a model, loaded once.

    Args:
        arguments: options of the application.
        prefill: handle of the deployment of prefill replicas; None: this replica computes prompts.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, arguments: Arguments, prefill: Any = None
    ) -> None:
        pool = ModelPool([served_model(arguments.model, arguments.load_arguments)])
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
        """Answer a request, and yield the ASGI messages of the answer as they arrive."""
        async for messages in answered(self._app, request):
            yield messages


def application(arguments: Arguments) -> Any:
    """Build the application for `serve.run`, `serve run` and Ray Serve's config files."""
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
    """Build a deployment of `count` replicas, routed by prefix.

    Each replica reserves as many CPUs as it has threads.
    """
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


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A router that sends requests whose prompts begin alike to the same replica, within bounds.

    The first argument of a call has the names of the prompt's beginnings as `prefix`.
    """

    def initialize_state(self, *, most_ahead: int) -> None:
        """Set up the routing; called by Ray Serve with `request_router_kwargs`."""
        self._routing = PrefixRouting(most_ahead=most_ahead)
        self._draw = random.Random()
        self._ongoing: dict[str, str] = {}  # the replica of each request

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request, the best first; Ray Serve takes the first with room."""
        if pending_request is not None:
            # if all replicas are full, Ray Serve waits before it asks them again
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counts = Counter(self._ongoing.values())
        busy = {replica: counts[replica] for replica in replicas}
        order = self._routing.ranked(_prefix(pending_request), busy, draw=self._draw)
        return [[replicas[replica]] for replica in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note the replica that has taken a request; called by Ray Serve."""
        self._ongoing[pending_request.metadata.internal_request_id] = replica_id.unique_id
        self._routing.sent(_prefix(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended or was not taken; called by Ray Serve."""
        self._ongoing.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas; called by Ray Serve when some have come or gone."""
        super().update_replicas(replicas)
        self._routing.keep_only([replica.replica_id.unique_id for replica in replicas])


def _prefix(pending_request: PendingRequest | None) -> list[bytes]:
    arguments = [] if pending_request is None else pending_request.args
    prefix: list[bytes] = getattr(arguments[0], "prefix", []) if arguments else []
    return prefix
