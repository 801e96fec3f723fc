"""A headless Chromium, driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import CEILING_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
    "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage",
)  # fmt: skip
# It reads commands from descriptor 3 and writes to 4.
_START = """
import fcntl, os, sys
pair = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for at, number in enumerate(pair):
    os.dup2(number, 3 + at)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab.

    Attributes:
        complaints: what its console has, of errors and of what its policy forbids.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.complaints: list[str] = []
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                return reply["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        result = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, *, seconds: float = CEILING_S) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} did not come to be true"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def look(self, width: int, height: int, *, scheme: str, mobile: bool = False) -> None:
        """Have a screen of this size, in CSS pixels, in `light` or `dark`."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], CEILING_S)
            assert ready, "Chromium says nothing"
            part = os.read(self._receive, 1 << 16)
            assert part, "Chromium has gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(str(event["params"]["entry"]["text"]))
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        return event


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Chromium with a profile of its own, until the block ends."""
    assert CHROMIUM is not None
    theirs, send = os.pipe()
    receive, theirs_too = os.pipe()
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs), str(theirs_too), *command],
        pass_fds=(theirs, theirs_too),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(theirs_too)
    try:
        yield Browser(send, receive)
    finally:
        os.close(send)  # it ends with that
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(receive)
