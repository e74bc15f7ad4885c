"""Open a page in a headless Chromium: run scripts in it, read its console, take pictures.

It speaks the DevTools protocol through a pair of pipes (`--remote-debugging-pipe`: JSON messages that end in a zero
byte), so nothing but the browser is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-dev-shm-usage", "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)  # fmt: skip


def browser() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser of its own; use it as a context.  seconds: limit of each command.

    errors: what the console and the page said that was wrong.
    """

    def __init__(self, width: int = 1400, height: int = 1000, seconds: float = 30.0) -> None:
        self.errors: list[str] = []
        self._seconds, self._number, self._buffer, self._session = seconds, 0, b"", ""
        self._events: list[dict[str, Any]] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        path = browser()
        assert path is not None, "no Chromium is installed"
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; other shells know no descriptor above 9.
        command = ["bash", "-c", f'exec 3<&{down_read} 4>&{up_write}; exec "$@"', "bash", path, *FLAGS]
        command += [f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(down_read, up_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(down_read)
        os.close(up_write)
        self._to, self._from = down_write, up_read
        try:
            self._attach(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int) -> None:
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]  # type: ignore[no-any-return]
            self._note(answer)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)  # type: ignore[no-any-return]

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"].get("exception", said["exceptionDetails"])))
        if method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))

    def open(self, path: Path) -> float:
        """Open a file, wait until it is loaded and drawn, and return the seconds that took."""
        self._events.clear()
        began = time.perf_counter()
        self("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + self._seconds
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._note(self._read(end))
        self.frame()
        return time.perf_counter() - began

    def frame(self) -> None:
        """Wait until what has changed is on the screen."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of a promise, in the page."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        """Show the page in dark or light colours, or as it is printed (kind "print")."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media=kind, features=[scheme])
        self.frame()

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the mouse: kind "mouseMoved", "mousePressed" or "mouseReleased"."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a screenshot.  whole: of the whole page, else of the window."""
        found = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()
