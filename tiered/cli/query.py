"""``tiered query``: the messages that have a key, newest first, of a tier or of an archive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.cat import tiers_of
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import ISOLATION_HELP, argument, flag, option, required
from tiered.cli.values import Moment, counted, few
from tiered.errors import DataError, InvalidError, no_topic

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.cli.call import Call
    from tiered.index.lookup import Lookup, Wish


_SCAN_BYTES = 256 << 20
_SHOWN = 64
"""Damaged places that an error names; it is one line."""


@dataclass(frozen=True, kw_only=True)
class QueryOptions:
    """What ``tiered query`` can be told."""

    url: str = argument("URL or folder of the tier, or of an archive")
    topic: str = argument()
    key: str = required("a key or unique id", kinds.Kind("KEY", str))
    from_: Moment | None = option("only messages stored from this time on", kinds.TIME)
    until: Moment | None = option("only messages stored before this time", kinds.TIME)
    count: int = option("maximum messages", kinds.COUNT, default=64)
    incarnations: bool = flag(
        "also search ended incarnations (an archive: always) and truncated messages"
    )
    scan_bytes: int | None = option(
        "maximum to read that no index covers", kinds.SIZE, default_text="256MiB"
    )
    raw_body: bool = flag("do not decompress bodies")
    isolation: str = option(ISOLATION_HELP, kinds.ISOLATION, default="read_committed")


@command("query", QueryOptions)
def run(call: Call, options: QueryOptions) -> int:
    """Finds messages by key or unique id, newest first.

    Examples:
        tiered query file:///tmp/tier orders --key order-17
        tiered query s3://bucket2/parquet orders --key order-17 --from now-2h --count 1
    """
    from tiered.index.lookup import hit_line

    is_document = _is_document(call)
    objects = call.objects(options.url)
    if is_archive(objects):
        rows = look(call, options, objects)
        _print(call, rows, is_document=is_document)
        if not rows:
            _say_nothing(call, options)
        return DONE
    tier = call.tier(options.url, isolation=options.isolation)
    wish = read_wish(call, options)
    tiers = tiers_of(call, tier, wish.topic)
    if not tiers[0].queues(wish.topic):
        raise no_topic(wish.topic, tier.topics(), where=tier.store.url)
    found = _joined([one.lookup(wish) for one in tiers], wish.count)
    lines = [hit_line(hit, raw_body=options.raw_body) for hit in found.hits]
    _print(call, lines, found, is_document=is_document)
    if not lines:
        _say_nothing(call, options)
    if found.unscanned:
        call.say(
            f"tiered: {counted(found.unscanned, 'message')} that no index covers yet"
            f" {'was' if found.unscanned == 1 else 'were'} not looked at;"
            " raise --scan, or make the index with `tiered rebuild URL --index`"
        )
    _require_sound(found, tier.store.url)
    return NEEDS_A_PERSON if found.unscanned else DONE


def _joined(found: list[Lookup], count: int) -> Lookup:
    """What the tier has and what retry logs of its mounts have, which came later."""
    from tiered.index.lookup import Lookup

    return Lookup(
        [hit for one in reversed(found) for hit in one.hits][:count],
        sum(one.unscanned for one in found),
        [error for one in found for error in one.damaged],
        sum(one.lost for one in found),
        sum(one.objects_read for one in found),
    )


def _require_sound(found: Lookup, url: str) -> None:
    """End with what could not be read, when all that was found is printed."""
    if not found.damaged:
        return
    places = list(dict.fromkeys(f"{one.what} ({one.where})" for one in found.damaged))
    which = counted(found.lost, "message") if found.lost else "the way to messages"
    raise DataError(
        f"{which} that may have the key cannot be read: {few(places, _SHOWN)}",
        where=url,
        do="what else there is was printed; `tiered verify URL --deep --store STORE --repair` mends what it can, and"
        " `tiered rebuild URL --index` the key index",
    )


def _say_nothing(call: Call, options: QueryOptions) -> None:
    from tiered.cli.values import span_text

    span = span_text(options.from_, options.until)
    call.say(f"tiered: no messages of {options.topic} with the key {options.key!r}{span}")


def read_wish(call: Call, options: QueryOptions) -> Wish:
    """What the options say."""
    from tiered.index.lookup import Wish

    bounds = {"from_ms": call.ms(options.from_), "until_ms": call.ms(options.until)}
    return Wish(
        topic=options.topic,
        key=options.key,
        count=options.count,
        every_incarnation=options.incarnations,
        scan_bytes_max=_SCAN_BYTES if options.scan_bytes is None else options.scan_bytes,
        **{name: value for name, value in bounds.items() if value is not None},
    )


def _is_document(call: Call) -> bool:
    """``-o json``; it counts on the command line only, since it is set for other commands elsewhere."""
    is_given = call.is_given("output") or call.is_given("json")
    if is_given and call.form not in {"json", "jsonl"}:
        raise InvalidError(
            f"query does not print messages as {call.form}", do="leave out -o, or say json"
        )
    return is_given and call.form == "json"


def _print(
    call: Call, lines: list[bytes], found: Lookup | None = None, *, is_document: bool
) -> None:
    """Print messages; of an archive nothing is ever missing."""
    out = call.stdout
    if is_document:
        complete = b"true" if found is None or found.is_complete else b"false"
        head = b'{"format": 1, "is_complete": %b, "unscanned_messages": %d, "damaged_messages": %d, "messages": ['
        out.write(head % ((complete, found.unscanned, found.lost) if found else (complete, 0, 0)))
        out.write(b"\n" * bool(lines) + b",\n".join(lines) + b"\n" * bool(lines) + b"]}\n")
    else:
        out.writelines(line + b"\n" for line in lines)
    out.flush()


# --------------------------------------------------------------------------------------------------
# ``tiered query`` of an archive: what it finds there, and how little it reads for it.
# --------------------------------------------------------------------------------------------------

THREADS = 8
"""Files looked at at once."""


def is_archive(store: ObjectStore) -> bool:
    """Whether the place has an archive's log; one request."""
    from tiered.archive.model import LOG

    return next(iter(store.list(LOG)), None) is not None


def look(call: Call, options: QueryOptions, archive: ObjectStore) -> list[bytes]:
    """The messages as lines of JSON, newest first."""
    from tiered.archive.lookup import lines, lookup
    from tiered.archive.selection import MAX, MIN, Selection

    for is_given, word, why in (
        (options.raw_body, "--raw-body", "has bodies unpacked"),
        (options.scan_bytes is not None, "--scan", "needs no index"),
    ):
        if is_given:
            raise InvalidError(f"an archive {why}", do=f"leave out {word}")
    low, high = call.ms(options.from_), call.ms(options.until)
    wanted = Selection(key=options.key).among("topic", [options.topic])
    wanted = wanted.within(
        "store_ts", MIN if low is None else low * 1000, MAX if high is None else high * 1000 - 1
    )
    with ThreadPoolExecutor(THREADS, "tiered-query") as pool:
        found = lookup(archive, wanted, count=options.count, spread=pool.map)
    call.say(
        f"tiered: read {counted(found.groups_read, 'row group')} of"
        f" {counted(found.files_read, 'file')}, of {counted(found.files, 'file')} of the topic"
    )
    return list(lines(found.rows))
