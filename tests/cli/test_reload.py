"""Rules for topics in the configuration file, and reading that file again on SIGHUP."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine, Start


def put(tiered: CommandLine, store: Path, topic: str, count: int = 3, body: str = "eA==") -> None:
    lines = store.parent / "more.jsonl"
    line = f'{{"topic": "{topic}", "queue_id": 0, "properties": {{}}, "body_base64": "{body}"}}\n'
    lines.write_text(line * count)
    tiered.good("store", "put", store, lines)


def messages(tiered: CommandLine, url: str) -> dict[str, int]:
    ran = tiered("ls", url, "-o", "jsonl")
    return {row["topic"]: row["messages"] for row in ran.rows} if ran.code == 0 else {}


@pytest.fixture
def store(tiered: CommandLine, tmp_path: Path) -> Path:
    tiered.good("store", "create", tmp_path / "store")
    for topic in ("orders", "events", "debug-1"):
        put(tiered, tmp_path / "store", topic)
    return tmp_path / "store"


class Heard:
    """What a process says on stderr, as it comes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.text = process, ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.text += line.decode()

    def hang_up(self, until_said: str) -> None:
        """Send SIGHUP, and wait for what it says."""
        before = self.text.count(until_said)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.text.count(until_said) > before, until_said)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._thread.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


@contextmanager
def attached(start: Start, store: Path, url: str, *more: str) -> Iterator[Heard]:
    heard = Heard(start("attach", store, "--to", url, "--freshness", "0.1", *more))
    try:
        yield heard
    finally:
        heard.end()
    assert heard.process.returncode == 0, heard.text


def test_what_can_change_changes_and_what_cannot_is_named(
    tiered: CommandLine, start: Start, store: Path, tmp_path: Path
):
    url, file = str(tmp_path / "tier"), tmp_path / "tiered.toml"
    file.write_text('[topics."debug*"]\ninclude = false\n[topics.orders]\npause = true\n')
    with attached(start, store, url, "--config", str(file)) as heard:
        until(lambda: messages(tiered, url).get("events") == 3)
        put(tiered, store, "orders")
        put(tiered, store, "events")
        until(lambda: messages(tiered, url).get("events") == 6)
        assert messages(tiered, url).keys() == {"events"}
        file.write_text("[attach]\nsegment-age = '1s'\nuploads = 3\nlease-seconds = 7\n")
        heard.hang_up("uploads cannot change")
        assert "settings that changed: attach.segment-age" in heard.text
        assert "attach.lease-seconds cannot change while this runs" in heard.text
        until(lambda: messages(tiered, url) == {"events": 6, "orders": 6, "debug-1": 3})
        until(
            lambda: all(row["segments"] == row["sealed_segments"] for row in rows_of(tiered, url))
        )
        file.write_text("[topics.events]\nrate = 1\n")
        heard.hang_up("the configuration file was read")
        put(tiered, store, "events", 5)
        put(tiered, store, "orders")
        until(lambda: messages(tiered, url) == {"events": 7, "orders": 9, "debug-1": 3})
        file.write_text("")
        heard.hang_up("the configuration file was read")
        until(lambda: messages(tiered, url)["events"] == 11)
    tiered.good("verify", url, "--deep", "--store", store)


def rows_of(tiered: CommandLine, url: str) -> list[dict[str, int]]:
    return tiered.good("ls", url, "-o", "jsonl").rows


def test_a_broken_file_changes_nothing_and_is_told(
    tiered: CommandLine, start: Start, store: Path, tmp_path: Path
):
    url, file = str(tmp_path / "tier"), tmp_path / "tiered.toml"
    good = "[attach]\nexclude = ['debug*']\nmax-upload-rate = '1MiB'\n"
    file.write_text(good)
    with attached(start, store, url, "--config", str(file)) as heard:
        until(lambda: messages(tiered, url) == {"orders": 3, "events": 3})
        for broken in (
            "[attach",
            "[attach]\nfreshnes = 1",
            "[attach]\nsegment-age = 'x'",
            "[topics.a]\nttl = 'x'",
        ):
            file.write_text(broken)
            heard.hang_up("the old settings stay")
        file.unlink()
        heard.hang_up("the old settings stay")
        put(tiered, store, "events")
        until(lambda: messages(tiered, url) == {"orders": 3, "events": 6})
        file.write_text(good.replace("debug", "none"))
        heard.hang_up("settings that changed: attach.exclude")
        until(lambda: messages(tiered, url).get("debug-1") == 3)


def test_without_a_file_a_hangup_ends(
    start: Start, store: Path, tiered: CommandLine, tmp_path: Path
):
    url = str(tmp_path / "tier")
    with attached(start, store, url) as heard:
        until(lambda: messages(tiered, url).get("events") == 3)
        heard.process.send_signal(signal.SIGHUP)
        assert heard.process.wait(timeout=60) == 0


def test_each_command_uses_what_concerns_it(tiered: CommandLine, store: Path, tmp_path: Path):
    """One file for all: expire has times to live, archive leaves topics out, merging compresses some."""
    url, file = str(tmp_path / "tier"), tmp_path / "tiered.toml"
    file.write_text(
        '[topics."orders"]\nttl = "1ms"\ncompress = "none"\n'
        '[topics."*"]\nttl = "365d"\narchive = false\nrate = "50MiB"\n'
    )  # fmt: skip
    for topic in ("orders", "events"):
        put(tiered, store, topic, 200, "YWJj" * 500)
    for _ in range(10):
        put(tiered, store, "orders", 1)
        tiered.good("attach", store, "--to", url, "--once", "--seal", "--merge", "--config", file)
    steps = tiered.good("expire", url, "--config", file, "--json").document["steps"]
    assert {step["topic"] for step in steps} == {"orders"}
    asked = ("archive", url, "--to", tmp_path / "parquet", "--dry-run", "--json")
    assert tiered.good(*asked, "--config", file).document["tasks"] == []
    assert tiered.good(*asked).document["tasks"]
    shown = tiered.good("config", "show", "--config", file, "--json").document["settings"]
    rules = {row["key"]: row["value"] for row in shown if row["key"].startswith("topics.")}
    assert rules == {
        'topics."orders".ttl': "1ms", 'topics."orders".compress': "none",
        'topics."*".ttl': "52w1d", 'topics."*".archive': False, 'topics."*".rate': 50 << 20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topics = 3", "topics is no table"),
        ("[topics]\norders = 3", "topics.orders is no table of rules"),
        ("[topics.orders]\nttll = 3", "unknown key 'topics.\"orders\".ttll'"),
        ("[topics.orders]\nttl = 'soon'", "topics.\"orders\".ttl: 'soon' is not a duration"),
        ("[topics.orders]\ninclude = 'perhaps'", "neither true nor false"),
        ("[topics.orders]\ncompress = 'gzip'", "zstd, zstd:LEVEL or none"),
        ("[topics.orders]\nrate = '5 MiB/s'", "topics.\"orders\".rate: '5 MiB/s' is not a size"),
    ],
)
def test_a_wrong_rule_is_wrong_usage(text: str, words: str, tiered: CommandLine, tmp_path: Path):
    file = tmp_path / "t.toml"
    file.write_text(text)
    ran = tiered("config", "show", "--config", file)
    assert (ran.code, words in ran.error) == (2, True), ran.err
