"""``tiered archive --merge`` and ``--clean``: the files of an archive, without the tier's messages."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE
from tiered.cli.output import Output
from tiered.cli.planned import Document, ending_code, get_plan, show_result
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_duration, format_size
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.archive.merging import Merged
    from tiered.archive.model import Lane
    from tiered.archive.workshop import Workshop
    from tiered.cli.call import Call

_COLUMNS = ["planned", "new_files", "old_files", "rows", "old_bytes", "new_bytes", "entries"]
_SHOWN = 8
_NEW = ["key", "old_files", "rows", "old_bytes"]


def publish_tables(call: Call, at: Workshop) -> tuple[dict[str, Any], TieredStoreError | None]:
    """Publish the archive if that is asked for; what became of it, for output, and why it ended early."""
    if call.text("publish") is None:
        return {}, None
    from tiered.archive.publish import Destination, publish

    place = Destination.of(call.words("publish"))
    now = Progressed("opening the catalog")
    tables = []
    with call.progress("publish", lambda: now):
        try:
            for one in publish(at.archive, place, call.s3_options()):
                tables.append(asdict(one))
                now = Progressed(
                    f"{counted(len(tables), 'table')}, the last of {one.topic}", len(tables)
                )
        except TieredStoreError as error:
            return {"published": tables}, error
    return {"published": tables}, None


def run_merge(call: Call, at: Workshop) -> int:
    """Make large files of small ones."""
    from tiered.archive.job import log_writer
    from tiered.archive.merging import merge, plan_merge

    def takes(lane: Lane) -> bool:
        is_ours = (lane.cluster, lane.broker) == (at.place.cluster, at.place.broker)
        return is_ours and at.takes(lane.topic)

    log = log_writer(at)
    plan = plan_merge(log.state, takes=takes, small_bytes=call.whole("merge-below"))
    if call.flag("dry-run"):
        rows = [
            {
                "key": one.key,
                "old_files": len({piece.file.key for piece in one.pieces}),
                "rows": sum(piece.file.rows for piece in one.pieces),
                "old_bytes": sum({p.file.key: p.file.size_bytes for p in one.pieces}.values()),
            }
            for one in plan
        ]
        Output(call).emit({"format": 1, "archive": at.archive.url, "merges": rows}, rows, _NEW)
        return DONE
    now = Progressed(f"0 of {counted(len(plan), 'file')}")

    def told(result: Merged) -> None:
        nonlocal now
        text = f"{result.new_files} of {counted(result.planned, 'file')}, {format_size(result.new_bytes)}"
        now = Progressed(text, result.new_files, result.planned)

    with call.progress("merge", lambda: now):
        jobs = call.whole_or_none("jobs") or os.cpu_count() or 1
        result = merge(at, log, plan, jobs=jobs, told=told)
    published, refused = publish_tables(call, at)
    document = {
        "format": 1,
        "archive": at.archive.url,
        **{name: getattr(result, name) for name in _COLUMNS},
        "overtaken": result.overtaken,
        "replaced_files": len(log.state.replaced),
        "replaced_bytes": sum(one.size_bytes for one in log.state.replaced),
        **published,
    }
    Output(call).emit(document, [document], _COLUMNS)
    if log.state.replaced:
        call.say(
            f"tiered: {counted(document['replaced_files'], 'replaced file')}, {format_size(document['replaced_bytes'])},"
            " still there; `tiered archive --clean` deletes them after a grace"
        )
    if refused is not None:
        raise refused
    return DONE


def run_clean(call: Call, at: Workshop) -> int:
    """Delete files that others have replaced: plan, then apply."""
    from tiered.archive.clean import WHAT, apply_clean, plan_clean
    from tiered.archive.job import log_writer

    log = log_writer(at)
    grace_ms, limit = call.whole("grace"), call.whole("max-deletions")
    plan = get_plan(
        call, WHAT, at, lambda: plan_clean(at, log.state, grace_ms=grace_ms, limit=limit)
    )
    applied = None
    if call.text("apply") and plan["deletions"]:
        applied = apply_clean(at, log, plan)
    document = {**plan, "applied": applied}
    rows = [
        {"key": key, "size_bytes": size, "replaced_ms": at_ms}
        for key, size, at_ms in plan["deletions"]
    ]
    shown = {**document, "deletions": rows}
    columns = ["key", "size_bytes", "replaced_ms"]
    show_result(call, shown, rows="deletions", columns=columns, lines=_lines)
    return ending_code(call, document, has_work=bool(plan["deletions"]))


def _lines(document: Document) -> Iterator[str]:
    size = format_size(document["deletion_bytes"])
    yield f"plan      {counted(document['deletion_count'], 'replaced file')}, {size}"
    yield f"grace     {format_duration(document['grace_ms'])}"
    for refusal in document.get("refusals", ())[:_SHOWN]:
        yield f"harmed    {refusal}"
    if document["young"]:
        yield f"left      {format_count(document['young'])} replaced within the grace"
    if document["unnamed_count"]:
        yield (
            f"left      {counted(document['unnamed_count'], 'file')}, {format_size(document['unnamed_bytes'])}, that"
            " no entry names: of jobs that were killed, or of one at work (-o json lists them)"
        )
    if document["is_cut"]:
        yield "limit     there is more than --max-deletions allows in one run"
    applied = document["applied"]
    if applied is not None:
        yield (
            f"deleted   {counted(applied['deleted'], 'file')}, {format_size(applied['deleted_bytes'])}"
            f" (already gone: {applied['already_gone']})"
        )
    elif document["deletion_count"]:
        yield "nothing is changed; --apply - does it"
