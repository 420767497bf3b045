"""rebuild: a lost journal of a captured store's tier, by the command line."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import InTopic
    from support.command_line import CommandLine


@pytest.fixture
def copied(basic_tier: str, tmp_path: Path) -> Path:
    """A tier that may be damaged."""
    folder = tmp_path / "tier"
    shutil.copytree(basic_tier.removeprefix("file://"), folder)
    return folder


def journal_of(folder: Path) -> Path:
    (found,) = folder.glob("*/*/journal")
    return found


def test_a_deleted_journal_comes_back(
    tiered: CommandLine, basic: Path, copied: Path, basic_tier: str, dumped: InTopic
):
    url = f"file://{copied}"
    before = tiered.good("ls", basic_tier, "--json").document["queues"]
    cat = tiered.good("cat", basic_tier, "large").out
    shutil.rmtree(journal_of(copied))
    assert tiered("ls", url).code == 5
    planned = tiered("rebuild", url, "--exit-code", "--json")
    assert planned.code == 1
    assert planned.document["messages"] == 2613
    assert (planned.document["losses"], planned.document["orphans"]) == ([], [])
    assert not journal_of_exists(copied)
    assert "rebuilt" in tiered.good("rebuild", url, "--apply", "-").text.splitlines()[-1]
    verified = tiered.good("verify", url, "--deep", "--store", basic, "--json").document
    assert (verified["is_clean"], verified["checked_messages"]) == (True, 2613)
    assert verified["comparison"]["messages"] == 2613
    assert tiered.good("ls", url, "--json").document["queues"] == before
    assert tiered.good("cat", url, "large").out == cat
    again = tiered.good("rebuild", url, "--exit-code", "--json").document
    assert (again["is_needed"], again["is_applied"]) == (False, False)
    assert "nothing to rebuild" in tiered.good("rebuild", url).text


def journal_of_exists(folder: Path) -> bool:
    return any(folder.glob("*/*/journal/*"))


def test_a_writer_goes_on_in_a_rebuilt_tier(tiered: CommandLine, basic: Path, copied: Path):
    url = f"file://{copied}"
    shutil.rmtree(journal_of(copied))
    tiered.good("rebuild", url, "--apply", "-")
    tiered.good("attach", basic, "--to", url, "--once", "--quiet")
    verified = tiered.good("verify", url, "--deep", "--store", basic, "--json").document
    assert verified["checked_messages"] == 2613
    assert verified["recorded"]["orphans"] == 1  # the key index, which was made again


def test_exactly_the_plan_is_carried_out(tiered: CommandLine, copied: Path, tmp_path: Path):
    url, file = f"file://{copied}", tmp_path / "plan.json"
    shutil.rmtree(journal_of(copied))
    tiered.good("rebuild", url, "--plan", file)
    assert not journal_of_exists(copied)
    document = json.loads(file.read_text())
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps({**document, "broker": "other"}))
    assert "it was changed or cut" in tiered("rebuild", url, "--apply", strange).error
    strange.write_text("[" * 100_000)
    assert tiered("rebuild", url, "--apply", strange).code == 2
    more = next(copied.glob("*/*/bundle/0")) / f"{0:020d}-{7:010d}-0badcafe-{0:010d}"
    more.write_bytes(b"an orphan that came since")
    refused = tiered("rebuild", url, "--apply", file)
    assert (refused.code, "moved on" in refused.error) == (1, True)
    assert "/bundle has other objects (it had 1, and has 2)" in refused.error
    more.unlink()
    assert tiered.good("rebuild", url, "--apply", file, "--json").document["is_applied"]
    again = tiered.good("rebuild", url, "--apply", file)
    assert "this plan was applied before" in again.text
    assert tiered.good("rebuild", url, "--apply", file, "--json").document["was_applied"]
    assert tiered.good("verify", url, "--deep").code == 0


def test_what_is_lost_must_be_accepted(tiered: CommandLine, basic: Path, tmp_path: Path):
    copied = tmp_path / "tier"
    url = f"file://{copied}"
    small = ("--bundle-size", "16KiB", "--segment-size", "32KiB")
    tiered.good("attach", basic, "--to", url, "--once", *small, "--quiet")
    shutil.rmtree(journal_of(copied))
    for level in copied.glob("*/*/bundle/[1-9]"):
        shutil.rmtree(level)  # what was merged; what that was made of is there still
    assert tiered.good("rebuild", url, "--json").document["losses"] == []
    middle = sorted(copied.glob("*/*/queue/large/0000000000/0000000000/*"))
    assert len(middle) >= 3
    middle[1].unlink()
    assert len(tiered.good("rebuild", url, "--json").document["losses"]) == 1
    assert "--accept-gaps" in tiered("rebuild", url, "--apply", "-").error
    assert not journal_of_exists(copied)
    tiered.good("rebuild", url, "--apply", "-", "--accept-gaps")
    verified = tiered.good("verify", url, "--deep", "--json").document
    assert (verified["is_clean"], verified["recorded"]["gaps"]) == (True, 1)


def test_no_tier_at_all(tiered: CommandLine, tmp_path: Path):
    assert tiered("rebuild", f"file://{tmp_path}").code == 2


class Shop:
    """A store with two queues and its tier, whose journal's last entry is damaged."""

    def __init__(self, tiered: CommandLine, folder: Path) -> None:
        self.tiered = tiered
        self.store, self.folder, self.url = (
            folder / "store",
            folder / "tier",
            f"file://{folder}/tier",
        )
        self._lines = folder / "lines"
        tiered.good("store", "create", self.store, "--log-file-size", "1MiB")

    def tier(self, topic: str, count: int) -> None:
        """Store messages, and tier them in a bundle of their own."""
        line = json.dumps({"topic": topic, "queue_id": 0, "body_base64": "eA=="})
        self._lines.write_text(f"{line}\n" * count)
        self.tiered.good("store", "put", self.store, self._lines)
        self.attach()

    def attach(self) -> int:
        ran = self.tiered.good("attach", self.store, "--to", self.url, "--once", "--json")
        return int(ran.document["messages"])

    def lose(self, bundle: int) -> Path:
        """Have the end of the journal be cut, and one of the bundles be elsewhere."""
        journal = journal_of(self.folder)
        for checkpoint in journal.glob("*.checkpoint"):
            checkpoint.unlink()
        last = max(journal.iterdir())
        last.write_bytes(last.read_bytes()[:20])
        key = sorted(self.folder.glob("*/*/bundle/0/*"))[bundle]
        return key.rename(self.folder.parent / key.name)

    def queues(self) -> dict[str, tuple[int, int]]:
        found = self.tiered.good("ls", self.url, "--json").document["queues"]
        return {one["topic"]: (one["min_offset"], one["commit_offset"]) for one in found}

    def gaps(self) -> tuple[int, int]:
        (broker,) = self.tiered.good("status", self.url, "--json").document["brokers"]
        return broker["gaps"], broker["gap_messages"]


@pytest.mark.parametrize(
    ("bundle", "lost", "left"), [(0, (0, 30), (30, 50)), (1, (30, 50), (0, 50))]
)
def test_what_the_journal_knows_is_not_forgotten(
    bundle: int, lost: tuple[int, int], left: tuple[int, int], tiered: CommandLine, tmp_path: Path
):
    """Not the beginning of a queue, not its end; nobody takes a restored object for garbage meanwhile."""
    shop = Shop(tiered, tmp_path)
    for topic, count in (("orders", 30), ("orders", 20), ("others", 10)):
        shop.tier(topic, count)
    shop.lose(bundle)
    planned = tiered.good("rebuild", shop.url, "--json").document
    assert [(one["start"], one["end"]) for one in planned["losses"]] == [lost]
    refused = tiered("rebuild", shop.url, "--apply", "-")
    assert refused.code == 2
    name = f"orders/0 incarnation 0 queue offsets [{lost[0]}, {lost[1]})"
    assert (name in refused.error, "--accept-gaps" in refused.error) == (True, True)
    tiered.good("rebuild", shop.url, "--apply", "-", "--accept-gaps")
    assert shop.queues()["orders"] == left
    assert shop.gaps() == (1, lost[1] - lost[0])
    shop.tier("orders", 7)
    assert shop.queues()["orders"] == (left[0], 57)
    assert shop.gaps() == (1, lost[1] - lost[0])
    verified = tiered.good("verify", shop.url, "--deep", "--store", shop.store, "--json").document
    assert verified["is_clean"]
    assert len(tiered.good("cat", shop.url, "orders").rows) == 57 - (lost[1] - lost[0])


def test_a_queue_of_which_nothing_is_left_is_not_forgotten(tiered: CommandLine, tmp_path: Path):
    shop = Shop(tiered, tmp_path)
    shop.tier("orders", 30)
    shop.tier("others", 10)
    away = shop.lose(0)
    refused = tiered("rebuild", shop.url, "--apply", "-")
    assert refused.code == 2
    assert "orders/0 incarnation 0 queue offsets [0, 30)" in refused.error
    tiered.good("rebuild", shop.url, "--apply", "-", "--accept-gaps")
    assert shop.queues() == {"orders": (30, 30), "others": (0, 10)}
    assert shop.gaps() == (1, 30)
    assert shop.attach() == 0
    shop.tier("orders", 7)
    assert shop.queues()["orders"] == (30, 37)
    assert shop.gaps() == (1, 30)
    verified = tiered.good("verify", shop.url, "--deep", "--store", shop.store, "--json").document
    assert verified["is_clean"]
    assert away.exists()


def test_a_restored_object_is_no_loss(tiered: CommandLine, tmp_path: Path):
    shop = Shop(tiered, tmp_path)
    shop.tier("orders", 30)
    shop.tier("others", 10)
    (key,) = sorted(shop.folder.glob("*/*/bundle/0/*"))[:1]
    away = shop.lose(0)
    assert tiered("rebuild", shop.url, "--apply", "-").code == 2
    away.rename(key)
    tiered.good("rebuild", shop.url, "--apply", "-")
    assert (shop.queues()["orders"], shop.gaps()) == ((0, 30), (0, 0))
    shop.attach()
    assert tiered.good("verify", shop.url, "--deep", "--store", shop.store, "--json").document[
        "is_clean"
    ]


def test_a_lost_end_that_the_store_still_has_is_tiered_again_on_a_person_s_word(
    tiered: CommandLine, tmp_path: Path
):
    shop = Shop(tiered, tmp_path)
    for topic, count in (("orders", 30), ("orders", 20), ("others", 10)):
        shop.tier(topic, count)
    shop.lose(1)
    tiered.good("rebuild", shop.url, "--apply", "-", "--accept-gaps")
    assert shop.attach() == 0
    back = ("truncate", shop.url, "orders", "--queue", "0", "--to", "30", "--apply", "-")
    tiered.good(*back)
    assert shop.attach() == 20
    assert shop.queues()["orders"] == (0, 50)
    assert len(tiered.good("cat", shop.url, "orders").rows) == 50
    assert tiered.good("verify", shop.url, "--deep", "--store", shop.store, "--json").document[
        "is_clean"
    ]


def test_a_bundle_whose_table_is_damaged_needs_a_person(tiered: CommandLine, copied: Path):
    """What lies in it at the end of a queue is not a loss that anybody could name."""
    url = f"file://{copied}"
    shutil.rmtree(journal_of(copied).parent / "meta" / "journal")
    shutil.rmtree(journal_of(copied))
    bundle = max(path for path in copied.glob("*/*/bundle/*/*"))
    bundle.chmod(0o600)
    bundle.write_bytes(bytes(bundle.stat().st_size))
    planned = tiered("rebuild", url, "-o", "jsonl")
    assert (planned.code, planned.out) == (1, b"")
    assert f"{bundle.name}: the bundle's table is damaged" in planned.err
    refused = tiered("rebuild", url, "--apply", "-", "--json")
    assert (refused.code, refused.document["error"]["reason"]) == (2, "invalid")
    assert "--accept-unread" in refused.err
    assert not journal_of_exists(copied)
    done = tiered("rebuild", url, "--apply", "-", "--accept-unread", "--json")
    assert (done.code, done.document["is_applied"], done.document["unread_count"]) == (0, True, 1)
    assert [one["key"].rpartition("/")[2] for one in done.document["refused"]] == [bundle.name]
    assert tiered.good("rebuild", url).code == 0
