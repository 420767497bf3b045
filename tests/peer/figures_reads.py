"""Rows of cold reads: `tiered bench read` beside plain ranged GETs and beside the Java tiered store's reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from figures_common import (
    MIB,
    TIERED,
    Result,
    alternate,
    has_java,
    median,
    peer,
    run_json,
    store_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONE, SIXTEEN, MANY = "1 x 1, 200k x 1 KiB", "1 x 16, 500k x 1 KiB", "4 x 250, 200k x 256 B"


class Case(NamedTuple):
    """A row against Java.

    Attributes:
        store: Name of the store.
        latency_ms: Added to each request, on both sides.
        threads: Of our reader; Java has one a queue, 64 at most.
    """

    store: str
    latency_ms: int
    threads: int


CASES = (
    Case(ONE, 20, 1),
    Case(ONE, 0, 1),
    Case(SIXTEEN, 0, 2),
    Case(SIXTEEN, 20, 2),
    Case(MANY, 0, 1),
)


def tier_of(work: Path, name: str, *options: str, suffix: str = "") -> Path:
    """Our tier of a store, made on first use."""
    store = store_of(work, name)
    tier = work / f"reads-{store.name}{suffix}"
    if not tier.exists():
        run_json([*TIERED, "attach", str(store), "--to", tier.as_uri(), "--once", "--json", *options])  # fmt: skip
    return tier


def java_tier_of(work: Path, name: str) -> Path:
    """Java's tier of a store, made on first use."""
    store = store_of(work, name)
    tier = work / f"reads-{store.name}-java"
    if has_java() and not tier.exists():
        peer("dispatch", "--store", str(store), "--tier", str(tier), "--metadata", "lazy",
             "--set", "tieredStoreGroupCommitTimeout=0")  # fmt: skip
    return tier


def bench(tier: Path, *options: str) -> Result:
    """One run of ours."""
    return run_json([*TIERED, "bench", "read", tier.as_uri(), "--json", "--quiet", *options])


def sequential_row(work: Path, runs: int, case: Case) -> str:
    """Every queue of a store from its first to its last message, 32 messages at a time."""
    store = store_of(work, case.store)
    tier, other = tier_of(work, case.store), java_tier_of(work, case.store)
    latency = str(case.latency_ms)

    def ours() -> Result:
        return bench(tier, "--latency-ms", latency, "--threads", str(case.threads))

    def java() -> Result:
        if not has_java():
            return {"mib_per_s": 0, "warm": 0, "cpu_seconds": 0}
        result = peer("read", "--store", str(store), "--tier", str(other), "--passes", "2",
                      "--latency-ms", latency)  # fmt: skip
        return {**result, "warm": result["later_passes"][-1]["mib_per_s"]}

    mine, theirs = alternate(runs, ours, java)
    speed, cpu = median(mine, "mib_per_second"), median(mine, "cpu_seconds_per_gib")
    plain = median(mine, "copy_mib_per_second")
    line = (f"| read {case.store}, {case.latency_ms} ms a request | {speed:.0f} MiB/s, {cpu:.2f} CPU s/GiB, "
            f"{median(mine, 'peak_rss_bytes') / MIB:.0f} MiB RSS, {median(mine, 'requests_per_gib'):.0f} requests/GiB, "
            f"over-fetch {median(mine, 'overfetch'):.3f}, {median(mine, 'hedges'):.0f} hedges "
            f"| {1 / median(mine, 'ratio_to_copy'):.2f} of plain GETs ({plain:.0f}) ")  # fmt: skip
    if not has_java():
        return line + "| not measured | |"
    cold, warm = median(theirs, "mib_per_s"), median(theirs, "warm")
    java_cpu = median(theirs, "cpu_seconds") / (median(mine, "size_bytes") / MIB) * 1024
    return line + (f"| {cold:.0f} (warm {warm:.0f}) MiB/s, {java_cpu:.1f} CPU s/GiB "
                   f"| {speed / cold:.1f} x (warm {speed / warm:.1f} x), CPU {cpu / java_cpu:.2f} |")  # fmt: skip


def groups_row(work: Path, runs: int) -> str:
    """Many groups at once, within a limit of memory."""
    tier, limit = tier_of(work, SIXTEEN), 256
    (found,) = alternate(
        runs,
        lambda: bench(tier, "--pattern", "groups", "--groups", "64", "--memory", f"{limit}MiB", "--seconds", "10"),
    )  # fmt: skip
    held = max(float(result["cache_bytes_max"]) for result in found) / MIB
    slowest = min(float(result["slowest_group_ratio"]) for result in found)
    return (f"| 64 groups on 16 queues, {limit} MiB, 10 s | {median(found, 'mib_per_second'):.0f} MiB/s, "
            f"{median(found, 'cpu_seconds_per_gib'):.2f} CPU s/GiB; slowest group {slowest:.2f} of the mean; held at most "
            f"{held:.0f} MiB; {median(found, 'peak_rss_bytes') / MIB:.0f} MiB RSS | limit {limit} MiB | | |")  # fmt: skip


def stops_row(work: Path, runs: int, latency_ms: int) -> str:
    """Readers that begin and stop at random, each with nothing cached."""
    tier = tier_of(work, ONE)
    options = ("--pattern", "stops", "--reads", "40", "--latency-ms", str(latency_ms))
    (found,) = alternate(runs, lambda: bench(tier, *options))
    return (f"| 40 readers that stop at random, {latency_ms} ms | over-fetch {median(found, 'overfetch'):.2f}, "
            f"{median(found, 'mib_per_second'):.0f} MiB/s | | | |")  # fmt: skip


def stalls_row(work: Path, runs: int, pattern: str) -> str:
    """The same reads, undisturbed and with two requests of a hundred held up by a second."""
    tier = tier_of(work, SIXTEEN)
    options = ("--pattern", pattern, "--latency-ms", "20", "--reads", "400", "--threads", "4")
    calm, stalled = alternate(
        runs,
        lambda: bench(tier, *options),
        lambda: bench(tier, *options, "--stall-percent", "2", "--stall-ms", "1000"),
    )
    before, after = median(calm, "read_p99_ms"), median(stalled, "read_p99_ms")
    return (f"| {pattern}, 20 ms, 2 % of requests + 1 s | p99 of a read {after:.1f} ms, "
            f"p50 {median(stalled, 'read_p50_ms'):.2f} ms, "
            f"{median(stalled, 'hedges') / median(stalled, 'requests') * 100:.1f} % hedges, "
            f"{median(stalled, 'mib_per_second'):.0f} MiB/s | undisturbed: p99 {before:.1f} ms, p50 "
            f"{median(calm, 'read_p50_ms'):.2f} ms, {median(calm, 'mib_per_second'):.0f} MiB/s "
            f"| | {after - 2 * before:+.1f} ms above twice the undisturbed |")  # fmt: skip


def keys_row(work: Path, runs: int) -> str:
    """Lookups by key over about 100 index objects; Java's lookups of its own index."""
    tier = tier_of(work, SIXTEEN, "--index-items", "10000", suffix="-index")
    (found,) = alternate(runs, lambda: bench(tier, "--pattern", "keys", "--reads", "400"))
    asked = found[0]["lookup_requests"]
    objects = sum(1 for path in tier.rglob("index/**/*") if path.is_file())
    line = (f"| lookup by key, {objects} index objects | requests of a hit {asked['hit']['mean']:.2f}, at most "
            f"{asked['hit']['max']}; of a miss {asked['miss']['mean']:.2f}, at most {asked['miss']['max']}; p99 "
            f"{median(found, 'read_p99_ms'):.1f} ms | ")  # fmt: skip
    if not has_java():
        return line + "| not measured | |"
    other = java_tier_of(work, SIXTEEN)
    theirs = peer("index-query", "--store", str(store_of(work, SIXTEEN)), "--tier", str(other),
                  "--lookups", "1000", "--consumers", "1")  # fmt: skip
    return line + f"| {theirs['provider_reads'] / theirs['lookups']:.2f} reads of a hit | |"


def times_row(work: Path, runs: int) -> str:
    """Offset by time in about a thousand segments."""
    small = ("--segment-size", "192KiB", "--bundle-size", "192KiB", "--buffer-size", "256KiB")
    tier = tier_of(work, ONE, *small, suffix="-segments")
    segments = sum(1 for path in tier.rglob("commitlog/*") if path.is_file())
    (found,) = alternate(runs, lambda: bench(tier, "--pattern", "times", "--reads", "200"))
    asked = found[0]["lookup_requests"]["time"]
    fetched = median(found, "fetched_bytes") / 200 / 1024
    return (f"| offset by time, {segments:,} segments | {asked['mean']:.2f} requests, at most {asked['max']}, "
            f"{fetched:.1f} KiB | | | |")  # fmt: skip


def reads_rows(work: Path, runs: int) -> Iterator[str]:
    """All of them."""
    for case in CASES:
        yield sequential_row(work, runs, case)
    yield groups_row(work, runs)
    for latency_ms in (0, 20):
        yield stops_row(work, runs, latency_ms)
    for pattern in ("seeks", "sequential"):
        yield stalls_row(work, runs, pattern)
    yield keys_row(work, runs)
    yield times_row(work, runs)
