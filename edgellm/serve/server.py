"""The uvicorn server around the application: its socket and its signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm.errors import OptionError
from edgellm.serve.answering import Answering
from edgellm.serve.application import create_app
from edgellm.serve.model_pool import ModelPool
from edgellm.serve.options import ServeOptions

# Seconds beyond the grace time in which stopped answers may end.
_MARGIN_S = 10


def serve(
    pool: ModelPool,
    options: ServeOptions,
    *,
    started: Callable[[str], None] | None = None,
    stopping: Callable[[int], None] | None = None,
) -> None:
    """Serve until a signal comes.

    The first SIGINT or SIGTERM lets answers end within the grace time, the second ends the process
    at once.

    Args:
        started: called with the server's address when clients can connect.
        stopping: called after the first signal with the number of unfinished asks, if there are
            any.

    Raises:
        OptionError: the server cannot listen at the address.
    """
    with _bound(options) as listener:
        app = create_app(pool, options)
        server = Server(app, listener, started=started, stopping=stopping)
        server.run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn's server with the signal handling that `serve` describes.

    Args:
        app: application from `create_app`.
        listener: bound socket.
        started, stopping: see `serve`.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        started: Callable[[str], None] | None = None,
        stopping: Callable[[int], None] | None = None,
    ) -> None:
        self._answering: Answering = app.state.answering
        options = self._answering.options
        self._address = address(listener, options)
        self._started, self._stopping = started, stopping
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol(
                    read_timeout_s=options.read_timeout_s, write_timeout_s=options.write_timeout_s
                ),
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(options.grace_s + _MARGIN_S),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._started is not None:
            self._started(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace_s, count = self._answering.options.grace_s, self._answering.on_their_way
        end = asyncio.get_running_loop().call_later(grace_s, self._answering.stop)
        if self._stopping is not None and count:
            with suppress(OSError):  # the reader of stderr may be gone
                self._stopping(count)
        await super().shutdown(sockets=sockets)
        end.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            sys.stdout.flush()
            os._exit(128 + sig)  # without waiting for steps, downloads and clients
        self.should_exit = True


def address(listener: socket.socket, options: ServeOptions) -> str:
    """Return the server's URL, or `unix:PATH` for a Unix socket."""
    if options.is_socket:
        return f"unix:{options.host}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _bound(options: ServeOptions) -> Iterator[socket.socket]:
    """Yield a socket bound to the address in `options`; close and remove it in the end.

    Raises:
        OptionError: the address cannot be bound.
    """
    try:
        listener = _socket(options)
    except OSError as error:
        where = options.host if options.is_socket else f"{options.host}:{options.port}"
        raise OptionError(f"cannot listen at {where}: {error.strerror or error}") from None
    try:
        yield listener
    finally:
        listener.close()
        if options.is_socket:
            with suppress(FileNotFoundError):
                os.unlink(options.host)


def _socket(options: ServeOptions) -> socket.socket:
    if options.is_socket:
        _remove_stale(options.host)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if options.is_socket:
            before = os.umask(0o177)  # only its owner may connect
            try:
                listener.bind(options.host)
            finally:
                os.umask(before)
        else:
            if os.name != "nt":  # on Windows, two servers would share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((options.host, options.port))
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove the Unix socket of a server that was killed; connections to it are refused."""
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        try:
            client.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


# Bytes that the kernel may hold before they are sent. With its default of megabytes, a client that
# reads slowly would seem not to read at all for a long time.
_MOST_UNSENT = 1 << 16


def protocol(*, read_timeout_s: float, write_timeout_s: float) -> type[H11Protocol]:
    """Return a connection class for uvicorn with time limits that it lacks.

    A closed transport stays until the client has read all that was written, which may be never.

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
