"""What ``tiered archive`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered.archive.job import Result, Workshop
    from tiered.archive.plan import Plan, Task
    from tiered.archive.progress import Watch
    from tiered.cli.call import Call


def progressed(watch: Watch) -> Progressed:
    """How far a job is."""
    if not watch.segments_all:
        return Progressed("reading the logs")
    ahead = watch.ahead()
    left_s = watch.seconds_left
    left = "" if left_s is None else f", {format_duration(1000 * round(left_s))} left"
    more = f" (and {counted(ahead, 'task')} under way)" if ahead else ""
    text = (
        f"{format_count(watch.segments)} of {counted(watch.segments_all, 'segment')}{more},"
        f" {counted(watch.rows, 'message')},"
        f" {format_size(watch.size_bytes)} of {format_size(watch.bytes_all)}{left}"
    )
    return Progressed(text, watch.size_bytes, watch.bytes_all)


def say_left(call: Call, result: Result) -> None:
    """What was not archived, and why."""
    plan = result.plan
    known = plan.tasks or plan.opened or plan.archived_segments or plan.outside or plan.postponed
    if call.texts("topics") and not known:
        call.say("tiered: the tier has nothing of the topics that --topics and --exclude leave")
    if plan.opened:
        messages = sum(one.end - one.start for one in plan.opened)
        call.say(
            f"tiered: {counted(messages, 'message')} of {counted(len(plan.opened), 'queue')}, not sealed, so not archived;"
            " segments are sealed when full or old, by `tiered attach --once --seal`, or by --seal here while"
            " nothing is attached"
        )
    if plan.strange:
        lane, start = plan.strange[0]
        call.say(
            f"tiered: {counted(len(plan.strange), 'segment counts', 'segments count')} as archived, but"
            f" the archive has messages of other times there, the first of {lane} at {start}: it has another"
            " broker's of the same name, so this one needs"
            " an archive of its own"
        )
    if plan.outside:
        call.say(
            f"tiered: {counted(plan.outside, 'segment lies', 'segments lie')} outside of --from and --until"
        )
    later = plan.postponed + result.not_begun
    if later:
        call.say(f"tiered: {counted(later, 'segment is', 'segments are')} left to the next run")


def result_document(at: Workshop, result: Result, *, sealed: int) -> dict[str, Any]:
    """What a run did."""
    return {
        **_head(at, result.plan),
        "run": result.run,
        "sealed": sealed,
        "segments": result.segments,
        "by_others": result.overtaken,
        "files": result.files,
        "rows": result.rows,
        "holes": result.holes,
        "bad": result.bad,
        "misfits": result.misfits,
        "columns_unknown": result.unknown,
        "source_bytes": result.source_bytes,
        "size_bytes": result.size_bytes,
        "entries": result.entries,
        "postponed": result.plan.postponed + result.not_begun,
        "open": _open_rows(result.plan),
        "failed": [
            {"lane": str(task.lane), "start": task.start, "end": task.end, "why": str(error)}
            for task, error in result.failed
        ],
    }


def plan_document(at: Workshop, plan: Plan) -> dict[str, Any]:
    """What a run would do."""
    return {
        **_head(at, plan),
        "postponed": plan.postponed,
        "open": _open_rows(plan),
        "tasks": list(task_rows(plan.tasks)),
    }


def task_rows(tasks: Iterable[Task]) -> Iterable[dict[str, Any]]:
    """Segments that are to be archived."""
    for task in tasks:
        yield {
            "topic": task.lane.topic,
            "queue_id": task.lane.queue_id,
            "incarnation": task.lane.incarnation,
            "start": task.start,
            "end": task.end,
            "size_bytes": task.size_bytes,
        }


def _head(at: Workshop, plan: Plan) -> dict[str, Any]:
    return {
        "format": 1,
        "archive": at.archive.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "planned": len(plan.tasks),
        "planned_bytes": plan.size_bytes,
        "archived_before": plan.archived_segments,
        "outside": plan.outside,
        "strange": len(plan.strange),
    }


def _open_rows(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "topic": one.lane.topic,
            "queue_id": one.lane.queue_id,
            "start": one.start,
            "end": one.end,
            "size_bytes": one.size_bytes,
        }
        for one in plan.opened
    ]
