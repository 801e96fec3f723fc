"""Options of a server, checked when they are created."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from edgellm.checks import check_choice, check_flag, check_number, check_text, check_texts
from edgellm.errors import OptionError
from edgellm.options import POOLING, Pooling

# Lowest and highest value, and whether it is a whole number.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "port": (0, 65535, True),
    "max_body_bytes": (1024, 1 << 32, True),
    "read_timeout_s": (0.05, 3600, False),
    "write_timeout_s": (0.05, 86400, False),
    "max_waiting": (1, 100_000, True),
    "max_waiting_tokens": (1, 1 << 40, True),
    "max_n": (1, 1024, True),
    "max_tokens": (1, 1 << 40, True),
    "time_limit_ms": (1, 1 << 40, True),
    "heartbeat_s": (0.05, 3600, False),
    "grace_s": (0, 3600, False),
    "cache_reuse": (0, 1 << 31, True),
}
_MAY_BE_NONE = ("max_tokens", "time_limit_ms")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        host: address to listen at, or the path of a Unix socket (`*.sock`).
        port: TCP port to listen at; 0 takes a free one.
        api_keys: keys, one of which has to be sent on every route but `/health` and the page.
            With several, clients with different keys do not find each other's prompts in the KV
            cache, and get equally many tokens computed while they ask at once.
        insecure: whether to listen without keys at an address that other machines can reach.
        allowed_hosts: names that a request may give as `Host`, beside those of this machine.
        allowed_origins: web pages (`https://app.example`) that may call the server and read its
            answers (CORS), beside programs and pages of this machine (`http://localhost:3000`).
        max_body_bytes: largest body of a request.
        read_timeout_s: seconds in which the headers of a request have to come, and again its body.
        write_timeout_s: seconds in which a client has to read on; then its answer is ended.
        max_waiting: largest number of prompts without a first token, and of embedding requests
            without a result; further ones are refused with 503. With several keys, each key may
            always have its share of them.
        max_waiting_tokens: largest number of tokens in all waiting prompts; further prompts are
            refused with 503. Each key may always have its share, and one prompt of any length.
        max_n: largest number of answers to one prompt.
        max_tokens: largest number of tokens in one answer; None: the context's length is the limit.
        time_limit_ms: time for one answer, from its arrival; None: no limit.
        heartbeat_s: seconds after which a silent event stream sends a comment.
        grace_s: seconds in which answers may end after the server is told to stop.
        pooling: embedding of a text: the mean of its tokens' states, or the last state.
        metrics: whether `/metrics` is answered.
        cache_reuse: tokens at the end of an earlier prompt of a client that are worth copying to
            the end of its next one, behind a change, for requests of llama.cpp's `/infill` and
            `/completion` that do not say so; 0: none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    read_timeout_s: float = 30
    write_timeout_s: float = 300
    max_waiting: int = 64
    max_waiting_tokens: int = 1 << 17
    max_n: int = 16
    max_tokens: int | None = None
    time_limit_ms: int | None = None
    heartbeat_s: float = 15
    grace_s: float = 30
    pooling: Pooling = "mean"
    metrics: bool = True
    cache_reuse: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: a value is not allowed, or other machines could reach the server without a
                key.
        """
        for name, (low, high, whole) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                check_number(name, value, low, high, whole=whole)
        check_text("host", self.host)
        check_flag("insecure", self.insecure)
        check_flag("metrics", self.metrics)
        check_choice("pooling", self.pooling, POOLING)
        for name in ("api_keys", "allowed_hosts", "allowed_origins"):
            check_texts(name, getattr(self, name))
        if self.is_socket and not hasattr(socket, "AF_UNIX"):
            raise OptionError(
                f"`host` is {self.host!r}, but Python has no Unix sockets on this system: give a "
                "name or an address, and a `port`"
            )
        if not (self.api_keys or self.insecure or self.is_local):
            raise OptionError(
                f"`host` is {self.host!r}, which others can reach: give them a key with "
                "`api_keys`, or take `insecure`"
            )

    @property
    def is_socket(self) -> bool:
        """Whether `host` is the path of a Unix socket."""
        return self.host.endswith(".sock")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.is_socket or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one, which means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
