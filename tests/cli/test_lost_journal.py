"""A tier whose journal is gone, or has lost its end: every command that opens it refuses, and names ``rebuild``."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.api import tier as api
from tiered.api.broker_place import find_places
from tiered.api.local_and_tier import open_message_store
from tiered.errors import JournalLostError
from tiered.log.reader import TierReader
from tiered.spark.options import TierStates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.command_line import CommandLine

COMMANDS = {
    "attach": ("attach", "{store}", "--to", "{url}", "--once", "--quiet"),
    "status": ("status", "{url}"),
    "status of a broker": ("status", "{url}", "--cluster", "{cluster}", "--broker", "{broker}"),
    "status of a store": ("status", "{url}", "--store", "{store}"),
    "ls": ("ls", "{url}"),
    "ls objects": ("ls", "{url}", "--objects"),
    "cat": ("cat", "{url}", "orders"),
    "query": ("query", "{url}", "orders", "--key", "k"),
    "verify": ("verify", "{url}"),
    "verify deep": ("verify", "{url}", "--deep"),
    "verify store": ("verify", "{url}", "--store", "{store}"),
    "repair": ("verify", "{url}", "--deep", "--repair"),
    "gc": ("gc", "{url}", "--grace", "1ms", "--apply", "-"),
    "expire": ("expire", "{url}", "--ttl", "1s", "--apply", "-"),
    "delete-topic": ("delete-topic", "{url}", "orders", "--apply", "-"),
    "truncate": ("truncate", "{url}", "orders", "--queue", "0", "--to", "1", "--apply", "-"),
    "lease": ("lease", "{url}"),
    "rebuild index": ("rebuild", "{url}", "--index", "--apply", "-"),
    "archive": ("archive", "{url}", "--to", "{archive}", "--engine", "local"),
}


@pytest.fixture
def copied(basic_tier: str, tmp_path: Path) -> Path:
    """A tier that may be damaged."""
    folder = tmp_path / "tier"
    shutil.copytree(basic_tier.removeprefix("file://"), folder)
    return folder


def lose_all(folder: Path) -> None:
    (journal,) = folder.glob("*/*/journal")
    shutil.rmtree(journal)


def lose_the_end(folder: Path) -> None:
    (journal,) = folder.glob("*/*/journal")
    names = sorted(path.name for path in journal.iterdir())
    assert len(names) > 3
    last = max(name.partition(".")[0] for name in names)
    for name in names:
        if name.startswith(last) or "checkpoint" in name:
            (journal / name).unlink()


def lose_all_but_the_lease(folder: Path) -> None:
    lose_all(folder)
    for root in ("bundle", "index", "meta"):
        (found,) = folder.glob(f"*/*/{root}")
        shutil.rmtree(found)


def damage_an_entry(folder: Path) -> None:
    (journal,) = folder.glob("*/*/journal")
    for path in journal.glob("*.checkpoint"):
        path.unlink()
    second = sorted(journal.iterdir())[1]
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 1
    second.write_bytes(data)


LOSSES = {"all": lose_all, "the end": lose_the_end}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def words(command: str, folder: Path, store: Path) -> list[str]:
    (lease,) = folder.glob("*/*/lease")
    broker, cluster = lease.parent.name, lease.parent.parent.name.partition("_")[2]
    known = {"url": f"file://{folder}", "store": store, "cluster": cluster, "broker": broker}
    archive = f"file://{folder.parent}/archive"
    return [word.format(**known, archive=archive) for word in COMMANDS[command]]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_lost_journal_ends_every_command_with_code_5_and_names_rebuild(
    command: str, loss: str, tiered: CommandLine, basic: Path, copied: Path
):
    LOSSES[loss](copied)
    before = contents(copied)
    ran = tiered(*words(command, copied, basic))
    assert ran.code == 5
    assert "tiered rebuild" in ran.error
    assert ran.out == b""
    assert contents(copied) == before


@pytest.mark.parametrize("loss", LOSSES)
def test_the_doctor_names_a_lost_journal(loss: str, tiered: CommandLine, copied: Path):
    LOSSES[loss](copied)
    ran = tiered("doctor", f"file://{copied}", "--json")
    (found,) = [one for one in ran.document["checks"] if one["name"] == "journal"]
    assert (ran.code, found["status"]) == (1, "fail")
    assert "rebuild" in found["advice"]


def _open(url: str) -> None:
    api.open(url).close()


def _open_messages(url: str) -> None:
    open_message_store(None, url).close()


def _open_for_spark(url: str) -> None:
    TierStates({"path": url}).read()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("opens", [_open, _open_messages, _open_for_spark])
def test_a_lost_journal_is_an_error_of_every_door_of_the_api(
    opens: Callable[[str], None], loss: str, copied: Path
):
    LOSSES[loss](copied)
    with pytest.raises(JournalLostError, match="tiered rebuild"):
        opens(f"file://{copied}")


def test_a_lease_that_remembers_a_journal_of_which_nothing_is_left_is_told(
    tiered: CommandLine, basic: Path, copied: Path
):
    lose_all_but_the_lease(copied)
    url = f"file://{copied}"
    refused = tiered("attach", basic, "--to", url, "--once", "--quiet")
    assert (refused.code, "lost its end" in refused.error) == (5, True)
    assert tiered.good("rebuild", url, "--apply", "-", "--json").document["is_applied"]
    tiered.good("attach", basic, "--to", url, "--once", "--quiet")
    assert tiered.good("verify", url, "--deep", "--store", basic).code == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_rebuild_mends_it_and_the_next_writer_goes_on(
    loss: str, tiered: CommandLine, basic: Path, copied: Path
):
    LOSSES[loss](copied)
    url = f"file://{copied}"
    done = tiered.good("rebuild", url, "--apply", "-", "--json").document
    assert (done["is_applied"], done["losses"]) == (True, [])
    assert done["epoch"] > 1
    tiered.good("attach", basic, "--to", url, "--once", "--quiet")
    verified = tiered.good("verify", url, "--deep", "--store", basic, "--json").document
    assert (verified["is_clean"], verified["comparison"]["messages"]) == (True, 2613)
    assert tiered.good("lease", url, "--json").document["epoch"] == done["epoch"] + 1


def history_of(url: str) -> str:
    store = open_store(url, S3Options())
    try:
        (place,) = find_places(store)
        reader = TierReader(store, place.prefix)
        reader.refresh()
        return reader.state.history
    finally:
        store.close()


def lose_all_and_the_lease(folder: Path) -> None:
    lose_all(folder)
    next(folder.glob("*/*/lease")).unlink()


def lose_all_that_tells_it(folder: Path) -> None:
    lose_all_and_the_lease(folder)
    (copies,) = folder.glob("*/*/meta/journal")
    shutil.rmtree(copies)


@pytest.mark.parametrize(
    ("loss", "is_known"),
    [
        (lose_all, True),
        (lose_the_end, True),
        (lose_all_and_the_lease, True),  # the copies of checkpoints tell it
        (lose_all_that_tells_it, False),
    ],
)
def test_a_rebuilt_journal_is_of_the_same_history_where_that_is_known(
    loss: Callable[[Path], None], is_known: bool, tiered: CommandLine, copied: Path
):
    """Positions that are kept elsewhere, such as a stream's, stay good."""
    url = f"file://{copied}"
    before = history_of(url)
    loss(copied)
    tiered.good("rebuild", url, "--apply", "-")
    assert (history_of(url) == before) is is_known


@pytest.mark.parametrize("harm", [lose_all, damage_an_entry])
def test_a_store_that_tells_another_name_now_does_not_begin_beside_a_place_that_may_be_its_own(
    harm: Callable[[Path], None], tiered: CommandLine, basic: Path, copied: Path
):
    (journal,) = copied.glob("*/*/journal")
    journal.parent.rename(journal.parent.parent / "earlier-name")
    harm(copied)
    url = f"file://{copied}"
    before = contents(copied)
    attach = ("attach", basic, "--to", url, "--once", "--quiet")
    refused = tiered(*attach)
    assert (refused.code, "tiered rebuild" in refused.error) == (5, True)
    assert contents(copied) == before
    assert (
        tiered(*attach, "--cluster", "another", "--broker", "another").code == 0
    )  # it is meant so


def test_a_place_beside_it_is_read_when_it_is_named(tiered: CommandLine, basic: Path, copied: Path):
    url = f"file://{copied}"
    other = ("--cluster", "other", "--broker", "b")
    tiered.good("attach", basic, "--to", url, "--once", "--quiet", *other)
    lost = next(path for path in copied.glob("*/*/journal") if "other" not in str(path))
    shutil.rmtree(lost)
    assert tiered("status", url).code == 5
    assert "several brokers" in tiered("ls", url).error  # and the lost one is among them
    assert tiered.good("ls", url, *other).text


def test_an_empty_folder_is_still_no_tier(tiered: CommandLine, tmp_path: Path):
    ran = tiered("status", f"file://{tmp_path}")
    assert (ran.code, "there is no tier here" in ran.error) == (2, True)
