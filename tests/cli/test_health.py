"""What a supervisor is told: a sidecar that waits is left alone, one that stands still without a reason is started anew."""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from support.attachments import Running
from support.gate import Gate
from support.mounts import mounted, tier_of
from support.servers import free_port, use_server
from support.waiting import until

from backends.s3_settings import S3Options
from tiered.attach.observe import WatchedWriter
from tiered.attach.writer import Attachment, AttachSettings
from tiered.cli.serve import Shown
from tiered.clock import SystemClock
from tiered.dispatch.dispatcher import STUCK_S, Following
from tiered.metrics import METRICS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from support.command_line import Start
    from support.servers import S3Server

PAGES = ("/healthz", "/livez", "/readyz")
WELL = (200, "ok")


def page(port: int, name: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_an_outage_of_s3_is_no_reason_for_a_new_start(
    ministack: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It lasts longer than anything may stand still without a reason; this one has a name."""
    use_server(ministack, monkeypatch)
    monkeypatch.setattr("tiered.dispatch.dispatcher.STUCK_S", 1.0)
    with Gate(ministack.endpoint_url) as gate:
        options = S3Options(endpoint_url=gate.url, timeout_s=2.0)
        with Running(tmp_path, f"s3://{ministack.bucket()}/tier", options) as running:
            attachment, shown = running.attachment, Shown(METRICS, "tiered_up")
            shown.watch(WatchedWriter(attachment, SystemClock()), attachment.meter)
            running.level(1 / 3)
            pages = shown.pages()
            assert [pages[name]() for name in PAGES] == [(True, "ok")] * 3
            gate.shut()
            running.growing.grow(running.growing.whole_end)
            until(lambda: not pages["/healthz"]()[0], "nothing can be committed")
            (lives, said), ready = pages["/livez"](), pages["/readyz"]()
            assert (lives, ready) == (True, (True, "ok"))
            # A request that was cut while under way counts as failing: its outcome is unknown.
            assert re.match(r"nothing could be committed for \d+ s \((unreachable|failing): ", said)
            with monkeypatch.context() as patch:  # the same for no known reason
                patch.setattr(attachment.patient, "troubles", list)
                assert pages["/livez"]()[0] is False
            gate.reopen()
            running.level(seconds_max=60)
            until(lambda: pages["/healthz"]() == (True, "ok"), "all is well again")
            text = shown.exposition.text()
            assert 'tiered_request_errors_total{error="UnreachableError",kind="put"}' in text
            assert 'tiered_request_seconds_count{kind="put"}' in text
        running.check_whole()


def test_waiting_for_a_lease_is_told_before_anything_is_open(
    start: Start, basic: Path, tmp_path: Path
):
    url, port = f"file://{tmp_path}/tier", free_port()
    first = Attachment.open(str(basic), url, AttachSettings(lease_s=30))
    try:
        process = start("attach", basic, "--to", url, "--metrics-listen", f"127.0.0.1:{port}")
        waits = f"it waits for the lease of process {os.getpid()} on "
        until(lambda: page(port, "livez")[1].startswith(waits), "whom it waits for")
        assert page(port, "livez")[0] == 200
        assert [page(port, name)[0] for name in ("readyz", "healthz")] == [503, 503]
        assert "\ntiered_up 0.0\n" in page(port, "metrics")[1]
    finally:
        first.close()
    try:
        until(lambda: page(port, "readyz") == page(port, "healthz") == WELL, "it tiers")
    finally:
        process.terminate()
        process.communicate(timeout=60)


class Later(SystemClock):
    """The machine's clock, but for what has passed meanwhile."""

    passed_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.passed_s


def test_a_writer_that_stands_still_is_to_be_started_anew(
    monkeypatch: pytest.MonkeyPatch, basic: Path, tmp_path: Path
):
    """The disk of the broker's store does not answer; and nobody knows why nothing is committed."""
    clock, hangs, goes_on = Later(), threading.Event(), threading.Event()
    attachment = Attachment.open(
        str(basic), f"file://{tmp_path}/tier", AttachSettings(), clock=clock
    )
    shown = WatchedWriter(attachment, clock)
    real = Following.step

    def step(following: Following, window_bytes: int, *, until_idle: bool) -> bool:
        hangs.set()
        goes_on.wait(60)
        return real(following, window_bytes, until_idle=until_idle)

    monkeypatch.setattr(Following, "step", step)
    working = threading.Thread(target=attachment.run)
    working.start()
    try:
        assert hangs.wait(60)
        assert shown.stuck() == ""
        clock.passed_s += STUCK_S + 1
        assert shown.stuck().startswith("the local store was last looked at 60")
        goes_on.set()
        until(lambda: shown.stuck() == "", "it goes on")
    finally:
        goes_on.set()
        attachment.stop()
        working.join(60)
        assert shown.unready() == "it ends"
        attachment.close()


def test_a_mount_whose_loop_hangs_is_to_be_started_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(60)

    with mounted(tier_of("s01-basic", tmp_path)[1]) as served:
        mount = served.mount
        until(lambda: mount.is_serving, "it serves")
        assert mount.stuck() == ""
        monkeypatch.setattr("tiered.mount.mount._TURN_S", 0.05)
        assert mount._loop is not None
        mount._loop.call_soon_threadsafe(hang)
        assert hangs.wait(60)
        assert mount.stuck().startswith("no request was looked at for")
        goes_on.set()
        monkeypatch.undo()
        assert mount.stuck() == ""
