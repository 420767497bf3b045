"""A real browser, Debian's Chromium, driven through a pair of pipes by its DevTools protocol: no library is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_S = 60.0
NAMELESS = """
[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, [tabindex], svg[role]')]
  .filter(e => e.id != 'main')
  .filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length)))
  .map(e => e.outerHTML.slice(0, 80))
"""
TOO_WIDE = """
[...document.querySelectorAll('main *')]
  .filter(e => !e.closest('.scroll, pre, svg, .hidden') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))
"""


def program() -> str:
    """The browser; a test without one is left out, where that is allowed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        if os.environ.get("TIERED_REQUIRE") == "1":
            pytest.fail("no chromium, and this run may leave nothing out (TIERED_REQUIRE is set)")
        pytest.skip("no chromium on this machine: `make system` installs it as root")
    return found


@dataclass
class Browser:
    """One tab. Answers and events come through ``fd_in``, each ended by a zero byte."""

    fd_out: int
    fd_in: int
    session: str = ""
    _number: int = 0
    _left: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, **parameters: object) -> Any:
        """What the browser answers."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            said["sessionId"] = self.session
        os.write(self.fd_out, json.dumps(said).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == self._number:
                assert "error" not in got, (method, got["error"])
                return got["result"]
            self.events.append(got)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + END_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self.fd_in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self.fd_in, 1 << 20)
            assert chunk, "the browser has ended"
            self._left += chunk
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def begin(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Load a page, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next())

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **more,
            )  # fmt: skip

    def enter(self) -> None:
        """Press Enter, and wait for the page that this leads to."""
        self.events.clear()
        self.press("Enter", 13)
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next())

    def tab_to(self, wanted: str) -> None:
        """Go to the link of this text with the Tab key; the focus is seen at each step."""
        for _ in range(80):
            self.press("Tab", 9)
            assert self.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            text = self.ask(
                "document.activeElement.tagName == 'A' ? document.activeElement.innerText : ''"
            )
            if text == wanted and self.ask("!document.activeElement.closest('.crumbs')"):
                return
        raise AssertionError(f"no way to {wanted!r}")

    def check_fit(self, width: int) -> None:
        """Nothing is wider than the page is, but what can be moved in its own frame."""
        assert self.ask("document.documentElement.scrollWidth") <= width
        assert self.ask(TOO_WIDE) == []

    def complaints(self) -> list[str]:
        """What the console says: refused by the policy, not found, and the like."""
        return [
            one["params"]["entry"]["text"]
            for one in self.events
            if one["method"] == "Log.entryAdded" and one["params"]["entry"]["level"] == "error"
        ]

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Chromium without a window, on a profile of its own, while the block runs."""
    to_it, from_us = os.pipe()
    to_us, from_it = os.pipe()
    # It wants them as 3 and 4, which may be others' here: a shell puts them there.
    process = subprocess.Popen(
        [
            "bash", "-c", f'exec "$@" 3<&{to_it} 4>&{from_it}', "bash",
            program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "about:blank",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(to_it, from_it),
    )  # fmt: skip
    os.close(to_it)
    os.close(from_it)
    try:
        made = Browser(from_us, to_us)
        made.begin()
        yield made
        made.session = ""
        made.call("Browser.close")
    finally:
        os.close(from_us)
        os.close(to_us)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
