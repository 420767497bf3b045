"""An attachment in this process, on a store that grows; what it holds of the machine, and what it says."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support import captures, tier_checks
from support.growing import Growing, first_ms
from support.waiting import until

from tiered.attach.observe import collect
from tiered.attach.writer import Attachment, AttachResult, AttachSettings
from tiered.clock import SystemClock
from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from backends.s3_settings import S3Options

NAME = "s01-basic"


def settings(**changes: object) -> AttachSettings:
    """Many small parts, short pauses."""
    dispatch = DispatchSettings(
        freshness_s=0.1, bundle_bytes=32 << 10, backoff_s_min=0.05, backoff_s_max=0.5
    )
    return AttachSettings(dispatch=dispatch, lease_s=3.0, drain_s=5.0, **changes)  # type: ignore[arg-type]


class Running:
    """Follows a growing store while the ``with`` block runs; then drains.

    Attributes:
        growing: The store; nothing is in it at first.
        result: How it ended, after the block.
    """

    def __init__(self, folder: Path, url: str, options: S3Options | None = None) -> None:
        whole = captures.unpack(NAME, folder / "whole")
        (folder / "growing").mkdir()
        self.growing = Growing(whole, folder / "growing")
        self.growing.start(first_ms(NAME) - 1000)
        self.growing.grow(self.growing.whole_end // 3)
        self.url = url
        self.result: AttachResult | None = None
        self.error: BaseException | None = None
        self.attachment = Attachment.open(
            str(self.growing.store), url, settings(), options=options, rng=random.Random(1)
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.result = self.attachment.run()
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.attachment.stop()
        self._thread.join(60)
        self.attachment.close()
        self.growing.stop()

    def waits_for(self, reason: str) -> bool:
        """Whether the metrics say so."""
        return any(
            one.value > 0
            for one in collect(self.attachment, SystemClock())
            if one.name == "tiered_store_trouble_seconds" and one.labels["reason"] == reason
        )

    def level(self, share: float = 1.0, seconds_max: float = 30.0) -> None:
        """Let the store grow up to a share of it, and wait until the tier is level with it."""
        self.growing.grow(round(self.growing.whole_end * share))
        expected = sum(
            message["physical_offset"] + message["size"] <= self.growing.end
            for messages in captures.captured(NAME).messages.values()
            for message in messages
        )
        dispatcher = self.attachment.dispatcher
        assert dispatcher is not None
        self.until(
            lambda: dispatcher.counters.messages == expected, f"{expected} messages", seconds_max
        )

    def until(self, what: Callable[[], bool], why: str, seconds_max: float = 20.0) -> None:
        """Wait for something, while it runs."""
        until(lambda: self.error is not None or what(), why, seconds_max)
        assert self.error is None, self.error

    def check_whole(self, count: int = 2613) -> None:
        """After the block: nothing lost, nothing doubled, nothing wrong."""
        assert self.error is None, self.error
        assert self.result is not None
        tier_checks.check_sound(self.url, self.growing.store)
        dump = captures.captured(NAME)
        assert dump.count == count
        assert tier_checks.bounds(self.url) == dump.bounds


class Held:
    """What this process has of the machine; ``check`` holds what it has later against it."""

    def __init__(self) -> None:
        self._files = files()
        self._threads = threading.active_count()

    def check(self, *, wait_s: float = 20.0) -> None:
        """Nothing more than at first, perhaps after a moment."""
        deadline_s = time.monotonic() + wait_s
        while True:
            more = files() - self._files
            threads = threading.active_count() - self._threads
            if not more and threads <= 0:
                return
            if time.monotonic() > deadline_s:
                raise AssertionError((dict(more), [one.name for one in threading.enumerate()]))
            time.sleep(0.05)


def files() -> Counter[str]:
    """Open descriptors by what they are; sockets by nothing else than being one."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        found["socket" if target.startswith("socket:") else target] += 1
    return found


def own_threads() -> list[str]:
    """Names of the threads that an attachment has made; the command line's watch, of other tests, is none of them."""
    names, others = ("tiered-", "s3-range"), {"tiered-signals", "tiered-ending"}
    found = {one.name for one in threading.enumerate() if one.name.startswith(names)}
    return sorted(found - others)
