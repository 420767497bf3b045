"""Rows of cold reads: `tiered bench read` beside plain ranged GETs and beside the Java tiered store's reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from figures_common import (
    MANY,
    MIB,
    ONE,
    SIXTEEN,
    TIERED,
    Bench,
    Result,
    Row,
    SpeedRow,
    has_java,
    median,
    peer,
    run_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Case(NamedTuple):
    """A row against Java.

    Attributes:
        store: Name of the store.
        latency_ms: Added to each request, on both sides.
        threads: Of our reader; Java has one a queue, 64 at most.
        cold: Goal, times the peer's first pass.
        warm: Goal, times its second; 0: none.
        cpu: Goal, CPU s/GiB at most; 0: none.
        plain: Goal, share of plain GETs; 0: none.
    """

    store: str
    latency_ms: int
    threads: int
    cold: float
    warm: float = 0.0
    cpu: float = 0.0
    plain: float = 0.0


CASES = (
    Case(ONE, 20, 1, 8, plain=0.6),
    Case(ONE, 0, 1, 6),
    Case(SIXTEEN, 0, 2, 4, 2, 2.5),
    Case(SIXTEEN, 20, 2, 4, 2, 2.5),
    Case(MANY, 0, 1, 6, 3, 5),
    Case(MANY, 20, 1, 6),
)


def tier_of(bench: Bench, name: str, *options: str, suffix: str = "") -> Path:
    """Our tier of a store, made on first use."""
    store = bench.store(name)
    tier = bench.work / f"reads-{store.name}{suffix}"
    if not tier.exists():
        run_json([*TIERED, "attach", str(store), "--to", tier.as_uri(), "--once", "--json", *options])  # fmt: skip
    return tier


def java_tier_of(bench: Bench, name: str) -> Path:
    """Java's tier of a store, made on first use."""
    store = bench.store(name)
    tier = bench.work / f"reads-{store.name}-java"
    if has_java() and not tier.exists():
        peer("dispatch", "--store", str(store), "--tier", str(tier), "--metadata", "lazy",
             "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip
    return tier


def read(tier: Path, *options: str) -> Result:
    """One run of ours."""
    return run_json([*TIERED, "bench", "read", tier.as_uri(), "--json", "--quiet", *options])


def sequential_row(bench: Bench, case: Case) -> SpeedRow:
    """Every queue of a store from its first to its last message, 32 messages at a time."""
    store = bench.store(case.store)
    tier, other = tier_of(bench, case.store), java_tier_of(bench, case.store)
    latency = str(case.latency_ms)

    def ours() -> Result:
        return read(tier, "--latency-ms", latency, "--threads", str(case.threads))

    def java() -> Result:
        if not has_java():
            return {}
        result = peer("read", "--store", str(store), "--tier", str(other), "--passes", "2",
                      "--latency-ms", latency)  # fmt: skip
        return {**result, "warm": result["later_passes"][-1]["mib_per_s"]}

    mine, theirs = bench.alternate(ours, java)
    speed, cpu = median(mine, "mib_per_second"), median(mine, "cpu_seconds_per_gib")
    share = 1 / median(mine, "ratio_to_copy")
    goals = {
        "{:g}x": case.cold,
        "warm {:g}x": case.warm,
        "CPU {:g}": case.cpu,
        "GETs {:g}": case.plain,
    }
    numbers = (speed, cpu, median(mine, "peak_rss_bytes") / MIB, median(mine, "requests_per_gib"))
    row = SpeedRow(
        f"read {case.store}, {case.latency_ms} ms",
        numbers,
        limit=f"GETs {share:.2f}",
        goal=", ".join(form.format(goal) for form, goal in goals.items() if goal),
    )
    if not has_java():
        return row
    cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
    java_cpu = median(theirs, "cpu_seconds") / median(mine, "size_bytes") * MIB * 1024
    reached = speed >= case.cold * cold and speed >= case.warm * warm and share >= case.plain
    return replace(
        row,
        peer=f"{cold:.0f}, {warm:.0f}",
        ratio=f"{speed / cold:.1f}x, {speed / warm:.1f}x",
        cpu_share=f"{cpu / java_cpu:.2f}",
        reached=reached and (not case.cpu or cpu <= case.cpu),
    )


def groups_row(bench: Bench) -> Row:
    """Many groups at once, within a limit of memory."""
    tier, limit = tier_of(bench, SIXTEEN), 256
    options = (
        "--pattern",
        "groups",
        "--groups",
        "64",
        "--memory",
        f"{limit}MiB",
        "--seconds",
        "10",
    )
    (found,) = bench.alternate(lambda: read(tier, *options))
    held = max(float(result["cache_bytes_max"]) for result in found) / MIB
    slowest = min(float(result["slowest_group_ratio"]) for result in found)
    return Row("64 groups on 16 queues, 10 s",
               f"{median(found, 'mib_per_second'):.0f} MiB/s, CPU {median(found, 'cpu_seconds_per_gib'):.2f}; "
               f"slowest group {slowest:.2f} of the mean; held at most {held:.0f} MiB; "
               f"{median(found, 'peak_rss_bytes') / MIB:.0f} MiB RSS",
               goal=f"{limit} MiB held, slowest 0.5",
               reached=held <= limit and slowest >= 0.5)  # fmt: skip


def stops_row(bench: Bench) -> Row:
    """Readers that begin and stop at random, each with nothing cached."""
    tier = tier_of(bench, ONE)
    options = ("--pattern", "stops", "--reads", "40", "--latency-ms")
    near, far = bench.alternate(
        lambda: read(tier, *options, "0"), lambda: read(tier, *options, "20")
    )
    over = [median(found, "overfetch") for found in (near, far)]
    speed = [median(found, "mib_per_second") for found in (near, far)]
    return Row("40 readers that stop at random, 0 and 20 ms",
               f"over-fetch {over[0]:.2f} and {over[1]:.2f}, {speed[0]:.0f} and {speed[1]:.0f} MiB/s",
               goal="over-fetch 1.5", reached=max(over) <= 1.5)  # fmt: skip


def stalls_row(bench: Bench, pattern: str) -> Row:
    """The same reads, undisturbed and with two requests of a hundred held up by a second."""
    tier = tier_of(bench, SIXTEEN)
    options = ("--pattern", pattern, "--latency-ms", "20", "--reads", "400", "--threads", "4")
    stalls = ("--stall-percent", "2", "--stall-ms", "1000")
    calm, stalled = bench.alternate(
        lambda: read(tier, *options), lambda: read(tier, *options, *stalls)
    )
    before, after = median(calm, "read_p99_ms"), median(stalled, "read_p99_ms")
    return Row(f"{pattern}, 20 ms, 2 % of requests + 1 s",
               f"p99 of a read {after:.1f} ms, p50 {median(stalled, 'read_p50_ms'):.2f} ms, "
               f"{median(stalled, 'hedges') / median(stalled, 'requests') * 100:.1f} % hedges, "
               f"{median(stalled, 'mib_per_second'):.0f} MiB/s",
               limit=f"undisturbed: p99 {before:.1f} ms, p50 {median(calm, 'read_p50_ms'):.2f} ms, "
               f"{median(calm, 'mib_per_second'):.0f} MiB/s",
               goal="p99 2 x undisturbed + hedge delay")  # fmt: skip


def keys_row(bench: Bench) -> Row:
    """Lookups by key over many index objects; Java's lookups of its own index."""
    tier = tier_of(bench, SIXTEEN, "--index-items", "10000", suffix="-index")
    options = ("--pattern", "keys", "--reads", "400")
    (found,) = bench.alternate(lambda: read(tier, *options))
    asked = found[0]["lookup_requests"]
    objects = sum(1 for path in tier.rglob("index/**/*") if path.is_file())
    row = Row(f"lookup by key, {objects} index objects",
              f"requests of a hit {asked['hit']['mean']:.2f}, at most {asked['hit']['max']}; of a miss "
              f"{asked['miss']['mean']:.2f}, at most {asked['miss']['max']}; p99 {median(found, 'read_p99_ms'):.1f} ms",
              peer="not measured", goal="3 requests, a miss 1",
              reached=asked["hit"]["mean"] <= 3 and asked["miss"]["max"] <= 1)  # fmt: skip
    if not has_java():
        return row
    theirs = peer("index-query", "--store", str(bench.store(SIXTEEN)), "--tier", str(java_tier_of(bench, SIXTEEN)),
                  "--lookups", "1000", "--consumers", "1")  # fmt: skip
    return replace(row, peer=f"{theirs['provider_reads'] / theirs['lookups']:.2f} reads of a hit")


def times_row(bench: Bench) -> Row:
    """Offset by time in many segments."""
    small = ("--segment-size", "192KiB", "--bundle-size", "192KiB", "--buffer-size", "256KiB")
    tier = tier_of(bench, ONE, *small, suffix="-segments")
    (status,) = run_json([*TIERED, "status", tier.as_uri(), "--json"])["brokers"]
    options = ("--pattern", "times", "--reads", "200")
    (found,) = bench.alternate(lambda: read(tier, *options))
    asked = found[0]["lookup_requests"]["time"]
    fetched = median(found, "fetched_bytes") / 200 / 1024
    return Row(f"offset by time, {status['segments']:,} segments",
               f"{asked['mean']:.2f} requests, at most {asked['max']}, {fetched:.1f} KiB",
               goal="12 requests", reached=asked["max"] <= 12)  # fmt: skip


def reads_rows(bench: Bench) -> Iterator[Row | SpeedRow]:
    """All of them."""
    for case in CASES:
        yield sequential_row(bench, case)
    yield groups_row(bench)
    yield stops_row(bench)
    for pattern in ("seeks", "sequential"):
        yield stalls_row(bench, pattern)
    yield keys_row(bench)
    yield times_row(bench)
