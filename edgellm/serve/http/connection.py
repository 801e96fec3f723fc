"""uvicorn's HTTP connection with three time limits that it lacks.

The limits are for the headers of a request to come, for the rest of a body whose request was
answered without it, and for a client to read the answer. The last one is needed because a closed
transport stays until the client has read all that was written, which may be never.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Bytes that the kernel may hold before they are sent. With its default of megabytes, a client that
# reads slowly would seem not to read at all for a long time.
_MOST_UNSENT = 1 << 16


def protocol(*, read_timeout_s: float, write_timeout_s: float) -> type[H11Protocol]:
    """Return a connection class for uvicorn with these time limits.

    Args:
        read_timeout_s: seconds for the headers of a request to come, and for the rest of a body
            after its answer, such as a refusal.
        write_timeout_s: seconds in which a client has to read some of the bytes written for it,
            also after the end of the answer.
    """

    class Connection(H11Protocol):
        _client_end: asyncio.TimerHandle | None = None
        _next_look: asyncio.TimerHandle | None = None
        _unread = 0
        _read_at = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            address = self.client[0] if self.client else "-"
            self.logger = _Addressed(self.logger, {"address": address})  # type: ignore[assignment]
            _keep_little(transport.get_extra_info("socket"))
            self._wait_for_client()
            self._look_at_reader()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._client_is_next:
                self._stop_waiting()
            elif self._client_end is None:
                self._wait_for_client()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.our_state is h11.DONE:  # no further request has begun
                self._wait_for_client()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            if self._next_look is not None:
                self._next_look.cancel()
            super().connection_lost(exc)

        @property
        def _client_is_next(self) -> bool:
            """Whether the client has to send headers, or the rest of a body that was not read."""
            theirs, answered = self.conn.their_state, self.conn.our_state is h11.DONE
            return theirs is h11.IDLE or (theirs is h11.SEND_BODY and answered)

        def _wait_for_client(self) -> None:
            self._client_end = self.loop.call_later(read_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._client_end is not None:
                self._client_end.cancel()
                self._client_end = None

        def _look_at_reader(self) -> None:
            """Abort the connection if its unsent bytes have not changed for `write_timeout_s`."""
            unread, now = self.transport.get_write_buffer_size(), self.loop.time()
            if not unread or unread != self._unread:
                self._unread, self._read_at = unread, now
            elif now - self._read_at >= write_timeout_s:
                self.transport.abort()
                return
            self._next_look = self.loop.call_later(write_timeout_s / 4, self._look_at_reader)

    return Connection


class _Addressed(logging.LoggerAdapter[logging.Logger]):
    """Adapter of uvicorn's log that puts the client's address before each message."""

    @property
    def level(self) -> int:
        return self.logger.level

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        assert self.extra is not None
        return f"{self.extra['address']}: {msg}", kwargs


def _keep_little(connection: socket.socket) -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, option, _MOST_UNSENT)
