"""demo and bench: a made store is a real one, and both tell what was done."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiered.errors import InvalidError
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.plugin import sample_store
from tiered.plugin.sample_store import make_store

if TYPE_CHECKING:
    from cli.program import CommandLine


def test_demo_is_well_and_can_be_repeated(tiered: CommandLine, tmp_path: Path):
    arguments = ("demo", "--dir", tmp_path / "demo", "--messages", "300", "--json")
    for _ in range(2):
        found = tiered.good(*arguments).document
        assert found["is_well"]
        assert found["made"]["messages"] == found["tiered"]["messages"] == 300
        assert found["verified"]["compared_messages"] == 300


def test_what_demo_says_can_be_run(tiered: CommandLine, tmp_path: Path):
    text = tiered.good("demo", "--dir", tmp_path / "demo", "--messages", "100").text
    assert text.startswith("1. Made a store of 100 messages")
    tried = [line.split()[1:] for line in text.splitlines() if line.startswith("  tiered ")]
    assert [words[0] for words in tried] == ["status", "cat", "verify", "attach"]
    for words in tried[:3]:
        assert tiered.good(*shlex.split(" ".join(words))).out


def test_demo_never_empties_a_directory_of_others(tiered: CommandLine, tmp_path: Path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "precious").write_text("x")
    ran = tiered("demo", "--dir", tmp_path)
    assert ran.code == 2
    assert "no demo made it" in ran.error
    assert (tmp_path / "store" / "precious").exists()
    assert tiered("demo", "--dir", tmp_path / "store" / "precious").code == 2


def test_a_made_store_is_as_asked(tmp_path: Path):
    made = make_store(
        tmp_path / "s",
        topics=["a", "b"],
        queues=3,
        messages=100,
        body_bytes=10,
        seed=1,
        now_ms=1_700_000_000_000,
    )
    store = RocketMQStore.open(tmp_path / "s")
    try:
        bounds = store.queues()
        assert sum(bound.end - bound.min for bound in bounds.values()) == made.messages == 100
        assert set(bounds) == {MessageQueue(t, q) for t in "ab" for q in range(3)}
        identity = store.identity
        assert (identity.cluster, identity.broker) == ("sample-cluster", "sample-broker")
        report = store.report()
        assert report.log_end == made.size_bytes
        assert (report.torn_bytes, report.damaged_records, report.foreign_entries) == (0, 0, 0)
        assert not report.rebuilt_queues
    finally:
        store.close()
    with pytest.raises(InvalidError):
        make_store(
            tmp_path / "s", topics=["a"], queues=1, messages=1, body_bytes=1, seed=1, now_ms=1
        )


def test_a_made_store_rolls_its_files(
    tiered: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sample_store, "QUEUE_FILE_BYTES", 2_000)
    make = ("bench", "make-store", tmp_path / "s", "--messages", "1000", "--body", "200")
    made = tiered.good(
        *make, "--queues", "2", "--topics", "2", "--file-size", "100000", "--json"
    ).document
    assert made["messages"] == 1000
    assert len(list((tmp_path / "s" / "commitlog").iterdir())) > 3
    url = f"file://{tmp_path}/t"
    measured = tiered.good(
        "bench", "dispatch", "--store", tmp_path / "s", "--to", url, "--json"
    ).document
    assert (measured["messages"], measured["is_complete"]) == (1000, True)
    assert measured["size_bytes"] == made["size_bytes"]
    assert measured["copy_seconds"] > 0
    assert measured["ratio_to_copy"] == pytest.approx(
        measured["seconds"] / measured["copy_seconds"], rel=0.1
    )
    read = tiered.good("bench", "read", url, "--json").document
    assert (read["messages"], read["size_bytes"]) == (1000, made["size_bytes"])
    part = tiered.good("bench", "read", url, "--topic", "bench-1", "--queue", "1", "--json")
    assert part.document["messages"] == 250
    assert tiered("bench", "read", url, "--topic", "none").code == 2
    assert tiered.good("verify", url, "--deep", "--store", tmp_path / "s").code == 0
    again = tiered("bench", "dispatch", "--store", tmp_path / "s", "--to", url)
    assert again.code == 2
    assert "there is a tier already" in again.error
    assert not list(Path(tmp_path).glob("tiered-bench-*"))


def test_the_same_seed_makes_the_same_store(tmp_path: Path):
    logs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        make_store(
            folder, topics=["t"], queues=1, messages=10, body_bytes=50, seed=seed, now_ms=10**12
        )
        with (folder / "commitlog" / f"{0:020d}").open("rb") as log:
            logs.append(log.read(5000))
    assert logs[0] == logs[1] != logs[2]


def test_bench_alone_does_all_of_it(tiered: CommandLine):
    tiered.environment = {"TIERED_BENCH_MAKE_STORE_MESSAGES": "2000"}
    ran = tiered.good("bench")
    lines = ran.text.splitlines()
    assert [line.split()[0] for line in lines] == ["what", "dispatch", "read"]
    assert re.search(r"2,000 messages", ran.err)
