"""Names that others have put into a tier's folder: they stop nothing, and are named where a person looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support import captures, command_line

if TYPE_CHECKING:
    from pathlib import Path


def test_names_of_others_are_counted_and_named_and_stop_nothing(tmp_path: Path):
    store, tier = captures.unpack("s01-basic", tmp_path), tmp_path / "tier"
    url = f"file://{tier}"
    command_line.here("attach", store, "--to", url, "--once").good()
    (journal,) = tier.glob("*/*/journal")
    for name in ("README", "a\nb", "\udcff"):
        (journal.parent / name).write_bytes(b"")
        (journal / name).write_bytes(b"")
    (tier / "link").symlink_to(journal)
    wanted = {"README", "a\\nb", "\\xff", "journal/README", "journal/a\\nb", "journal/\\xff"}
    command_line.here("attach", store, "--to", url, "--once").good()
    report = command_line.here("verify", url, "--json").good().document
    assert report["recorded"]["unknown_keys"] == len(wanted)
    notes = {note.removeprefix("unknown: ") for note in report["recorded"]["notes"]}
    assert wanted <= notes
    left = command_line.here("gc", url, "--json").good().document["left"]
    assert {key.split("/", 2)[2] for key in left["unknown_keys"]} == wanted
    assert left["unknown"] == len(wanted)
    checks = command_line.here("doctor", url, "--json").document["checks"]
    (found,) = [one for one in checks if one["name"] == "foreign_keys"]
    assert (found["status"], "6 of others" in found["detail"]) == ("warn", True)
