"""``tiered verify``: whether a tier is whole, and equal to a local store."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import make_command
from tiered.cli.options import argument, flag, option
from tiered.cli.output import Output
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_size

if TYPE_CHECKING:
    from tiered.api.broker_place import Place
    from tiered.cli.call import Call
    from tiered.log.verify_report import VerifyReport
    from tiered.upkeep.repair import RepairReport

THREADS = 4
_NEUTRAL = frozenset(
    {
        *("notes", "ended_lives", "taken_back", "taken_back_messages"),
        *("unreferenced_bytes", "unindexed_messages"),
    }
)
"""What ``--strict`` does not count: it is neither lost nor left over."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What ``tiered verify`` can be told."""

    url: str = argument()
    deep: bool = flag("read and check every byte of every object")
    store: str | None = option(
        "local store directory to compare with, message by message",
        "DIR",
        str,
        default_text="none",
    )
    repair: bool = flag(
        "upload again what is damaged and the local store (or another object) still has, and check again"
    )
    strict: bool = flag("end with code 1 also for what is recorded")
    timers: bool = flag("check the broker's timers, which lie apart, instead of its topics")


def run(call: Call, options: VerifyOptions) -> int:
    """Check and print."""
    from tiered.api.broker_place import choose_place
    from tiered.api.stores import backend_errors
    from tiered.attach.timer_place import choose_timers
    from tiered.cli.tiers import open_both, open_local
    from tiered.log.verify import verify_tier
    from tiered.upkeep.repair import Repairer

    output = Output(call)
    done = Progressed("reading the journal")

    def told(done_bytes: int, total_bytes: int) -> None:
        nonlocal done
        text = f"{format_size(done_bytes)} of {format_size(total_bytes)}"
        done = Progressed(text, done_bytes, total_bytes)

    with contextlib.ExitStack() as stack, backend_errors():
        raw, store = open_both(call, options.url, stack)
        directory = options.store
        local = open_local(call, directory, stack) if directory else None
        choose = choose_timers if options.timers else choose_place
        place = choose(store, call.common.cluster, call.common.broker)
        executor = stack.enter_context(ThreadPoolExecutor(THREADS, "tiered-verify"))
        stack.enter_context(call.progress("verifying", lambda: done))

        def verified() -> VerifyReport:
            is_deep = options.deep
            return verify_tier(
                store, place.prefix, deep=is_deep, local=local, executor=executor, progress=told
            )

        report, repair = verified(), None
        if options.repair and report.damaged:
            rng, stop = random.SystemRandom(), threading.Event()
            repairer = Repairer(
                raw, store, place.prefix, local, clock=call.clock, rng=rng, stop=stop
            )
            repair = _document_of(repairer.run(report.damaged))
            report = verified()
    if options.repair:
        for line in unlooked(is_deep=options.deep, has_store=local is not None):
            call.say(line)
    document = report_document(report, place, store.url, is_deep=options.deep, repair=repair)
    if output.form == "table":
        _show(output, document)
    else:
        output.emit(document, document["problems"], ["kind", "where", "detail"])
    is_fine = report.is_clean and not (options.strict and has_recorded(document))
    return DONE if is_fine else NEEDS_A_PERSON


def unlooked(*, is_deep: bool, has_store: bool) -> list[str]:
    """What ``--repair`` did not look at, for lack of an option."""
    lines = []
    if not is_deep:
        lines.append(
            "tiered: --repair without --deep mends objects that are gone or of another size;"
            " damage within objects was not looked for, which --deep does"
        )
    if not has_store:
        lines.append(
            "tiered: --repair without --store has nothing to take lost records from; give the broker's store"
        )
    return lines


def _document_of(done: RepairReport) -> dict[str, Any]:
    unrepaired = [{"where": one.where, "reason": one.reason} for one in done.unrepaired]
    return {"parts": done.parts, "repaired_bytes": done.repaired_bytes, "unrepaired": unrepaired}


def report_document(
    report: VerifyReport,
    place: Place,
    url: str,
    *,
    is_deep: bool,
    repair: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of ``tiered verify --json``."""
    fields = asdict(report)
    fields.pop("damaged")
    problems, recorded = fields.pop("problems"), fields.pop("recorded")
    return {
        "format": 1,
        "url": url,
        "cluster": place.cluster,
        "broker": place.broker,
        "is_clean": report.is_clean,
        "is_deep": is_deep,
        "problem_count": sum(report.problem_counts.values()),
        **fields,
        "problem_counts": dict(report.problem_counts),
        "recorded": recorded,
        "repair": repair,
        "problems": problems,
    }


def has_recorded(document: dict[str, Any]) -> bool:
    """Whether there is anything that ``--strict`` counts."""
    return any(value for name, value in document["recorded"].items() if name not in _NEUTRAL)


def _show(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['cluster']}/{document['broker']}")
    output.line(
        f"  named     {counted(document['messages'], 'message')} in {counted(document['queues'], 'queue')},"
        f" {format_size(document['named_bytes'])} in {counted(document['named_objects'], 'object')}"
    )
    if document["is_deep"]:
        output.line(
            f"  checked   {counted(document['checked_messages'], 'message')},"
            f" {format_size(document['checked_bytes'])}"
            f" in {counted(document['checked_objects'], 'object')}"
        )
    if document["comparison"]:
        found = ", ".join(_counts(document["comparison"]))
        output.line(f"  compared  {found or 'nothing'}")
    recorded = _counts(document["recorded"])
    if recorded:
        output.line(f"  recorded  {', '.join(recorded)}")
    for note in document["recorded"]["notes"]:
        output.line(f"  note      {note}")
    if document["repair"]:
        _show_repair(output, document["repair"])
    if document["is_clean"]:
        output.line("  result    whole" + ("" if document["is_deep"] else " (--deep reads all)"))
        return
    output.line(f"  result    {counted(document['problem_count'], 'problem')}")
    output.line()
    output.table(document["problems"], ["kind", "where", "detail"])


def _show_repair(output: Output, repair: dict[str, Any]) -> None:
    size = format_size(repair["repaired_bytes"])
    output.line(f"  repaired  {counted(repair['parts'], 'part')}, {size}")
    for one in repair["unrepaired"]:
        output.line(f"  left      {one['where']}: {one['reason']}")


def _counts(fields: dict[str, Any]) -> list[str]:
    return [
        f"{format_size(value) if name.endswith('_bytes') else format_count(value)}"
        f" {name.removesuffix('_bytes').replace('_', ' ')}"
        for name, value in fields.items()
        if isinstance(value, int) and value
    ]


COMMAND = make_command(
    "verify",
    VerifyOptions,
    run,
    examples=[
        "tiered verify file:///tmp/tier --deep",
        "tiered verify s3://bucket/prefix --store /data/rocketmq/store --json",
    ],
)
