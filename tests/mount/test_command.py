"""``tiered mount`` as operators run it: signals, exit codes, metrics, and files that are none."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.command_line import here, program
from support.mounts import Client, MountProcess, page, tier_of
from support.oracle import free_ports
from support.tls import Authority
from support.waiting import until

from backends.local import HIDDEN
from tiered.format.remoting import FrameError
from tiered.metrics import MOUNT_METRICS
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    import subprocess

ANY = ("--listen", "127.0.0.1:0")
PLACE = {"consumerGroup": "g", "topic": "orders", "queueId": 1}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return tier_of("s01-basic", tmp_path)[1]


def test_it_serves_until_it_is_told_to_stop_and_keeps_where_consumers_are(url: str, tmp_path: Path):
    metrics = f"127.0.0.1:{next(free_ports())}"
    options = (*ANY, "--metrics-listen", metrics, "--snapshot-seconds", "3600")
    with MountProcess(url, tmp_path / "log", *options) as mount:
        with Client(mount.address) as client:
            assert client.pull("orders", 1, 0).code == Code.SUCCESS
            assert client.ask(310, b"message", a="g", b="orders").code == Code.NO_PERMISSION
            assert client.ask(12_345).code == Code.REQUEST_CODE_NOT_SUPPORTED
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
            client.heartbeat("c", "g", "orders")
            assert page(metrics, "/healthz") == (200, "ok")
            assert page(metrics, "/readyz") == page(metrics, "/livez") == (200, "ok")
            assert page(metrics, "/else")[0] == 404
            text = page(metrics, "/metrics")[1]
        assert 'tiered_mount_requests_total{request="PULL_MESSAGE"} 1' in text
        assert 'tiered_mount_answers_total{code="NO_PERMISSION"} 1' in text
        assert 'tiered_mount_pulls_total{status="FOUND"} 1' in text
        assert "tiered_mount_consumers 1" in text
        names = {metric.name for metric in MOUNT_METRICS}
        told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        rare = {
            name
            for name in names
            if any(part in name for part in ("errors", "dropped", "name_servers", "replica"))
        }
        assert names - rare <= told
        code, document = mount.end(signal.SIGTERM)
    assert code == 0
    assert document["is_drained"]
    assert (document["name"], document["groups"], document["snapshots"]) == ("broker-a", 1, 1)
    with MountProcess(url, tmp_path / "log2", *ANY) as mount, Client(mount.address) as client:
        found = client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE)
        assert found.fields == {"offset": "17"}


def test_a_misspelled_topic_is_told(url: str, tmp_path: Path):
    options = (*ANY, "--topics", "oders", "--topics", "ord*")
    with MountProcess(url, tmp_path / "log", *options) as mount:
        until(lambda: "--topics" in mount.text, "the name is told")
        assert "no topic matches --topics oders yet" in mount.text
        assert "ord*" not in mount.text


def test_after_a_crash_another_begins_at_the_last_snapshot(url: str, tmp_path: Path):
    options = (*ANY, "--snapshot-seconds", "0.1")
    with MountProcess(url, tmp_path / "log", *options) as mount:
        with Client(mount.address) as client:
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
            until(
                lambda: len(list(tmp_path.rglob("meta/mount/broker-a/journal/*"))) == 2,
                "a snapshot",
            )
        mount.end(signal.SIGKILL)
    with MountProcess(url, tmp_path / "log2", *ANY) as mount, Client(mount.address) as client:
        found = client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE)
        assert found.fields == {"offset": "17"}


def test_a_second_one_of_the_same_name_waits_or_goes_and_another_name_is_free(
    url: str, tmp_path: Path
):
    with MountProcess(url, tmp_path / "log", *ANY):
        away = program("mount", url, *ANY, "--no-wait")
        assert away.code == 4
        assert "another mount serves under this name" in away.error
        with MountProcess(url, tmp_path / "log2", *ANY, "--name", "broker-z") as other:
            assert "as cluster-a/broker-z at" in other.text


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--listen", "nowhere"), 2, "not a HOST:PORT"),
        (("--namesrv", "127.0.0.1"), 2, "not a HOST:PORT"),
        (("--consumer-offsets", "/nonexistent"), 2, "cannot be read"),
        (("--consumer-offsets", "/dev/null"), 2, "no consumer offsets of a broker"),
        (("--tls-key", "/nonexistent"), 2, "goes with --tls-cert"),
        (("--tls-cert", "/nonexistent"), 2, "TLS cannot be served"),
        (("--broker", "other"), 2, "there is no tier here"),
        (("--listen", "192.0.2.1:1"), 2, "cannot listen at 192.0.2.1:1"),
        (("--namesrv", "127.0.0.1:1"), 3, "name server 127.0.0.1:1 does not answer"),
    ],
)
def test_what_cannot_be_is_told(options: tuple[str, ...], code: int, said: str, url: str):
    found = here("mount", url, *(() if options[0] == "--listen" else ANY), *options, "--no-state")
    assert (found.code, said in found.err) == (code, True), found


def test_consumers_go_on_where_the_broker_had_them(tmp_path: Path):
    store, url = tier_of("s10-consumers", tmp_path)
    known = store / "config" / "consumerOffset.json"
    place = {"consumerGroup": "filtered", "topic": "work", "queueId": 0}
    with MountProcess(url, tmp_path / "log", *ANY, "--consumer-offsets", known) as mount:
        assert "by --consumer-offsets" in mount.text
        with Client(mount.address) as client:
            found = client.ask(protocol.QUERY_CONSUMER_OFFSET, **place)
            assert int(found.fields["offset"]) > 0
        assert mount.end(signal.SIGTERM)[0] == 0
    with MountProcess(url, tmp_path / "log2", *ANY) as mount, Client(mount.address) as client:
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == found.fields


def test_other_commands_know_a_mounts_place(url: str, tmp_path: Path):
    """What a mount writes belongs to no message: nothing counts, misses or deletes it."""
    with MountProcess(url, tmp_path / "log", *ANY) as mount:
        with Client(mount.address) as client:
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
        assert mount.end(signal.SIGTERM)[0] == 0
    kept = sorted(tmp_path.rglob("meta/mount/**/*"))
    assert kept
    found = here("verify", url, "--deep", "--strict", "--json").good().document
    assert found["recorded"]["unknown_keys"] == 0
    plan = here("gc", url, "--grace", "1s", "--json").good().document
    assert (plan["deletions"], plan["left"]["unknown"]) == ([], 0), plan
    assert len(here("status", url, "--json").good().document["brokers"]) == 1
    checks = here("doctor", url, "--json").good().document["checks"]
    assert {row["name"]: row["status"] for row in checks}["foreign_keys"] == "ok"
    assert sorted(tmp_path.rglob("meta/mount/**/*")) == kept


def test_over_tls(url: str, tmp_path: Path):
    authority = Authority(tmp_path)
    options = (*ANY, "--no-state", "--tls-cert", authority.certificate("127.0.0.1"))
    with MountProcess(url, tmp_path / "log", *options) as mount:
        with Client(mount.address) as plain:
            assert _is_refused(plain)
        trusting = ssl.create_default_context(cafile=str(authority.bundle))
        with Client(mount.address) as client:
            client.socket = trusting.wrap_socket(client.socket, server_hostname="127.0.0.1")
            for offset in range(0, 200, 32):
                assert client.pull("orders", 1, offset).code == Code.SUCCESS
        assert mount.end(signal.SIGTERM)[0] == 0


def _is_refused(plain: Client) -> bool:
    """Whether a client without TLS gets no answer."""
    try:
        plain.ask(protocol.GET_MAX_OFFSET, topic="orders", queueId=0)
    except (ConnectionError, FrameError):
        return True
    return False


class Load:
    """A consumer that says without pause where it is, one message further each time."""

    def __init__(self, address: str, begin: int) -> None:
        self.acknowledged = [(time.monotonic(), begin)]
        self._client = Client(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        offset = self.acknowledged[-1][1]
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                offset += 1
                asked = {**PLACE, "commitOffset": offset}
                if self._client.ask(protocol.UPDATE_CONSUMER_OFFSET, **asked).code == Code.SUCCESS:
                    self.acknowledged.append((time.monotonic(), offset))

    def stop(self) -> int:
        """The last offset that was acknowledged."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._client.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._client.close()
        return self.acknowledged[-1][1]

    def before(self, moment_s: float) -> int:
        return max(offset for at_s, offset in self.acknowledged if at_s <= moment_s)


@pytest.mark.slow
def suspend(process: subprocess.Popen[str], url: str) -> None:
    """SIGSTOP at a moment at which it does not hold the lock of its folder: nobody could write there while it sleeps."""
    while True:
        process.send_signal(signal.SIGSTOP)
        with (Path(url.removeprefix("file://")) / HIDDEN / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                process.send_signal(signal.SIGCONT)
                time.sleep(0.01)
            else:
                return


def test_a_mount_that_hangs_is_taken_over_after_its_lease_and_its_later_offsets_are_nobodys(
    url: str, tmp_path: Path
):
    """As one of another host: nobody can see it dead. At most what was committed since the last snapshot is lost."""
    options = (*ANY, "--lease-seconds", "3", "--snapshot-seconds", "0.2")
    with contextlib.ExitStack() as held:
        first = held.enter_context(MountProcess(url, tmp_path / "first", *options))
        load = Load(first.address, 0)
        time.sleep(4)  # of load
        stopped_s = time.monotonic()
        suspend(first.process, url)
        last = load.stop()
        second = held.enter_context(MountProcess(url, tmp_path / "second", *options))
        assert "waiting for the mount of process" in second.text
        with Client(second.address) as client:
            kept = int(client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields["offset"])
        assert load.before(stopped_s - 2) <= kept <= last + 1
        load = Load(second.address, 10**9)
        first.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError), Client(first.address) as client:
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, **PLACE, commitOffset=1)
        assert first.process.wait(60) == 4
        last = load.stop()
        assert second.end(signal.SIGTERM)[0] == 0
    with MountProcess(url, tmp_path / "third", *ANY) as third, Client(third.address) as client:
        kept = int(client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields["offset"])
    assert last <= kept <= last + 1
    assert last > 10**9
