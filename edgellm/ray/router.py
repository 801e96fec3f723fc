"""Request router for Ray Serve that chooses replicas by `edgellm/ray/prefix_routing.py`."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from edgellm.ray.prefix_routing import PrefixRouting


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
