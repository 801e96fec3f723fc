"""Ray Serve's request router that goes by `edgellm/ray/prefix_routing.py`."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from edgellm.ray.prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests whose prompts begin alike to the same replica, within bounds.

    The first argument of a call has the names of the prompt's beginnings as `prefix`.
    """

    def initialize_state(self, *, most_ahead: int) -> None:
        """Called by Ray Serve with `request_router_kwargs`."""
        self._routing = PrefixRouting(most_ahead=most_ahead)
        self._draw = random.Random()
        self._ongoing: dict[str, str] = {}  # the replica of each request

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best one first; Ray Serve takes the first that has room."""
        if pending_request is not None:
            # when all of them are full, wait before they are asked again
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counts = Counter(self._ongoing.values())
        busy = {replica: counts[replica] for replica in replicas}
        order = self._routing.ranked(_prefix(pending_request), busy, draw=self._draw)
        return [[replicas[replica]] for replica in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray Serve when a replica has taken a request."""
        self._ongoing[pending_request.metadata.internal_request_id] = replica_id.unique_id
        self._routing.sent(_prefix(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when one has ended, or was not taken."""
        self._ongoing.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas have come or gone."""
        super().update_replicas(replicas)
        self._routing.keep_only([replica.replica_id.unique_id for replica in replicas])


def _prefix(pending_request: PendingRequest | None) -> list[bytes]:
    arguments = [] if pending_request is None else pending_request.args
    prefix: list[bytes] = getattr(arguments[0], "prefix", []) if arguments else []
    return prefix
