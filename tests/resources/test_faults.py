"""What attach holds of the machine: bounded while a store is in trouble of any kind, and back to the start afterwards."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.attachments import Held, Running, files, own_threads
from support.faultproxy import FaultProxy
from support.gate import Gate

from backends.errors import BackendError
from backends.registry import open_store
from backends.s3_settings import S3Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import S3Server

TROUBLE_S = 1.5
SOCKETS_MAX = 3 * 24
"""Connections at once: uploads, index uploads, lease, journal; each has three sockets, as the proxy is in this process."""
THREADS_MAX = 8 + 8 + 8 + 4
"""Uploads, index uploads, ranges of an object; build, compensate, seal and lease."""
ANSWERED: dict[str, dict[str, object]] = {
    "storm": {"kind": "status", "status": 503, "code": "SlowDown"},
    "reset": {"kind": "reset"},
    "half": {"kind": "half"},
    "lost": {"kind": "lost"},
    "slow": {"kind": "late", "seconds": 3.0},
}
"""Each in the place of many answers, to writes and reads."""


@pytest.fixture
def server(ministack: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return ministack


class Watch:
    """Looks every few milliseconds how much is held."""

    def __init__(self) -> None:
        self.sockets = 0
        self.threads: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._end.wait(0.02):
            self.sockets = max(self.sockets, files()["socket"])
            self.threads |= set(own_threads())

    @contextmanager
    def on(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()


def attach_through(
    server: S3Server, endpoint: str, folder: Path, trouble: Callable[[], None], mend: Callable[[], None]
) -> None:  # fmt: skip
    """Tier a third, then the rest while the trouble lasts and after it."""
    sockets, watch = files()["socket"], Watch()
    options = S3Options(endpoint_url=endpoint, timeout_s=2.0)
    url = f"s3://{server.bucket()}/tier"
    with watch.on():
        with Running(folder, url, options) as running:
            running.level(1 / 3)
            before = running.attachment.meter.snapshot()
            trouble()
            running.growing.grow(running.growing.whole_end)
            time.sleep(TROUBLE_S)
            mend()
            running.level(seconds_max=40)
            after = running.attachment.meter.snapshot()
        assert after.errors > before.errors
        running.check_whole()
    assert watch.sockets - sockets <= SOCKETS_MAX
    assert len(watch.threads) <= THREADS_MAX
    assert own_threads() == []
    assert list((folder / "temporary").iterdir()) == []


def warm(server: S3Server, folder: Path) -> None:
    """What a process makes once, as the threads of the S3 client's library, is there before anything is counted."""
    (folder / "warm").mkdir()
    with Running(folder / "warm", f"s3://{server.bucket()}/tier") as running:
        running.level(1 / 3)


FAULTS = [
    pytest.param(fault, marks=[] if fault == "lost" else pytest.mark.slow) for fault in ANSWERED
]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_answers_that_went_wrong(fault: str, server: S3Server, tmp_path: Path):
    warm(server, tmp_path)
    held = Held()
    with FaultProxy(server.endpoint_url) as proxy:

        def trouble() -> None:
            for method in ("PUT", "GET"):
                proxy.add(method=method, times=10_000, **ANSWERED[fault])  # type: ignore[arg-type]

        attach_through(server, proxy.url, tmp_path, trouble, proxy.rules.clear)
    held.check()


def test_an_error_that_somebody_keeps_keeps_no_connection(server: S3Server, tmp_path: Path):
    """Its traceback has the frames of a listing that failed."""
    warm(server, tmp_path)
    with FaultProxy(server.endpoint_url) as proxy:
        held = Held()
        proxy.add("status", method="GET")
        store = open_store(f"s3://{server.bucket()}/tier", S3Options(endpoint_url=proxy.url))
        with pytest.raises(BackendError) as kept:
            list(store.list(""))
        store.close()
        held.check(wait_s=5.0)
    assert kept.value.__traceback__ is not None


@pytest.mark.slow
def test_after_connections_were_refused(server: S3Server, tmp_path: Path):
    warm(server, tmp_path)
    held = Held()
    with Gate(server.endpoint_url) as gate:
        attach_through(server, gate.url, tmp_path, gate.shut, gate.reopen)
    held.check()
