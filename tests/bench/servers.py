"""Servers of language models, started here and asked over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

import httpx
from unserved import CONTEXT, Request, Timing

LOAD_TIMEOUT_S = 180.0
_LLAMA_SERVER = """
import sys, time, xllamacpp as x
model, port, threads, clients, context = sys.argv[1], *map(int, sys.argv[2:])
p = x.CommonParams()
p.model.path, p.hostnames, p.port = model, ["127.0.0.1"], port
p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch = context * clients, clients, 2048, 512
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
server = x.Server(p)
while True: time.sleep(60)
"""


class HttpServer:
    """A server with OpenAI's `/v1/completions`, started here.

    Attributes:
        arrivals: when text of a request (by its `id`) has arrived.
    """

    COMMANDS = ("edgellm", "llama-server")

    def __init__(self, name: str, model: str, *, clients: int, options: argparse.Namespace) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended before.
        """
        self.name = name
        self.arrivals: dict[int, list[float]] = {}
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        if name == "edgellm":
            # -P: the package that is installed, also where the working directory has its source
            command = [sys.executable, "-P", "-m", "edgellm.cli.main", "serve", model]
            command += [
                "--port",
                str(port),
                "-c",
                str(CONTEXT),
                "-t",
                str(options.threads),
            ]
            command += ["--cache-size", str(CONTEXT * min(clients + 2, 16))]
        else:
            sizes = [str(n) for n in (port, options.threads, clients, CONTEXT)]
            command = [options.python, "-c", _LLAMA_SERVER, model, *sizes]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def warm_up(self, prompt: list[int]) -> None:
        """Wake its threads; not counted."""
        self.run([Request(prompt, 4)], 1)

    def run(self, requests: Sequence[Request], clients: int) -> list[Timing]:
        """Ask, with so many requests on their way at once."""
        return asyncio.run(self._run(requests, clients))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        # llama-server closes connections that were idle while another runtime had its turn
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as client:
            yield client

    async def ask(self, client: httpx.AsyncClient, request: Request) -> Timing:
        """Read a stream to its end."""
        body = {
            "prompt": request.prompt,
            "max_tokens": request.count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals = self.arrivals[id(request)] = []
        tokens, start = 0, time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{self.name}: {(await response.aread()).decode()[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if any(choice["text"] for choice in event["choices"]):
                    arrivals.append(time.perf_counter())
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        end = time.perf_counter()
        first = arrivals[0] if arrivals else end
        last = arrivals[-1] if arrivals else end
        return Timing(first - start, last - first, tokens)

    async def _run(self, requests: Sequence[Request], clients: int) -> list[Timing]:
        waiting = list(reversed(requests))
        timings: list[Timing] = []
        async with self.client() as client:

            async def ask_all() -> None:
                while waiting:
                    timings.append(await self.ask(client, waiting.pop()))

            await asyncio.gather(*(ask_all() for _ in range(clients)))
        return timings

    def _wait(self) -> None:
        end = time.perf_counter() + LOAD_TIMEOUT_S
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended with {self._process.returncode}")
            try:
                if httpx.get(f"{self._url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        self._process.kill()
        raise RuntimeError(f"it does not answer after {LOAD_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
