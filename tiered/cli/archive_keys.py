"""``tiered archive --key-index``: makes the index of keys that lookups in an archive use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.cli.errors import DONE
from tiered.cli.output import Output
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_size

if TYPE_CHECKING:
    from tiered.archive.query.key_index import Built
    from tiered.archive.workshop import Workshop
    from tiered.cli.call import Call


def run_key_index(call: Call, at: Workshop) -> int:
    """Cover the files that no object of the index covers yet."""
    from tiered.archive.query.key_index import build
    from tiered.archive.tables import read_archive

    now = Progressed("0 files")

    def told(built: Built) -> None:
        nonlocal now
        now = Progressed(f"{counted(built.files, 'file')}, {format_size(built.size_bytes)}")

    with call.progress("key index", lambda: now):
        built = build(at.archive, read_archive(at.archive), told=told)
    document = {
        "format": 1,
        "archive": at.archive.url,
        "objects": built.objects,
        "files": built.files,
        "size_bytes": built.size_bytes,
    }
    Output(call).emit(document, [document], ["objects", "files", "size_bytes"])
    return DONE
