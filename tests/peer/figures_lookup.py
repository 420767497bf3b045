"""Lookups by key in an archive, beside DuckDB and beside the tier's own index: python tests/peer/figures_lookup.py DIR

1. An archive of --files files of --rows messages each is written by the archive's own writer into DIR, if it is not there.
2. Unique ids and keys that are there and that are not are looked up, with the key index and without; DuckDB is asked too.
3. A store of --messages messages is made, tiered with its index, sealed and archived: both are asked for the same keys.

Requests are counted at the store, times are CPU time of this process, so that other work on the machine matters less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.archive_jobs import alone
from support.archives_made import make_archive

from backends.registry import open_store
from backends.s3_settings import S3Options
from backends.wrapping import WrappingStore
from tiered.api.broker_place import choose_place
from tiered.archive.duck import ask
from tiered.archive.lookup import build, lookup, read_index
from tiered.archive.selection import Selection
from tiered.archive.tables import read_archive
from tiered.index.lookup import IndexReader, Wish
from tiered.journal.replay import JournalReader
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

THREADS = 8
SEED = 11


class Counting(WrappingStore):
    """Counts requests and bytes of everything but logs."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.requests = 0
        self.size_bytes = 0

    def get(self, key, byte_range=None):
        data = self._inner.get(key, byte_range)
        self._count(key, [data])
        return data

    def get_ranges(self, key, byte_ranges):
        found = self._inner.get_ranges(key, byte_ranges)
        self._count(key, found)
        return found

    def _count(self, key: str, data: Sequence[bytes]) -> None:
        if "journal/" not in key:
            self.requests += 1
            self.size_bytes += sum(map(len, data))

    def take(self) -> tuple[int, int]:
        found = self.requests, self.size_bytes
        self.requests = self.size_bytes = 0
        return found


def open_counting(url: str) -> Counting:
    return Counting(open_store(url, S3Options()))


def measured(keys: Iterable[str], do: Callable[[str], Any], stores: Sequence[Counting]) -> dict:
    """What lookups cost, each by itself."""
    rows = []
    for key in keys:
        for store in stores:
            store.take()
        cpu, wall = time.process_time(), time.perf_counter()
        found = do(key)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        counts = [store.take() for store in stores]
        rows.append((found, cpu, wall, sum(c[0] for c in counts), sum(c[1] for c in counts)))
    document = {
        "lookups": len(rows),
        "cpu_ms": round(statistics.median(row[1] for row in rows) * 1000, 2),
        "wall_ms": round(statistics.median(row[2] for row in rows) * 1000, 2),
        "requests_mean": round(statistics.mean(row[3] for row in rows), 2),
        "requests_max": max(row[3] for row in rows),
        "kib_mean": round(statistics.mean(row[4] for row in rows) / 1024, 1),
    }
    return {**document, "found": [row[0] for row in rows]}


def pruned(found: list[Any], groups: int) -> dict[str, Any]:
    """Of lookups: shares of files and row groups that were left out."""
    files = [1 - one.files_read / one.files for one in found]
    shares = [1 - one.groups_read / groups for one in found]
    return {
        "rows_mean": statistics.mean(one.rows.num_rows for one in found),
        "files_pruned_mean": round(statistics.mean(files), 4),
        "files_pruned_min": round(min(files), 4),
        "groups_pruned_mean": round(statistics.mean(shares), 4),
        "groups_pruned_min": round(min(shares), 4),
    }


def of_archive(folder: Path, files: int, rows: int, lookups: int) -> dict[str, Any]:
    """Steps 1 and 2."""
    url, ids_file = f"file://{folder}/archive", folder / "ids.json"
    store = open_counting(url)
    report: dict[str, Any] = {"files": files, "rows": files * rows}
    if not ids_file.exists():
        began = time.process_time()
        ids = make_archive(store, files=files, rows=rows, rng=random.Random(SEED), told=_told)
        report["write_cpu_s"] = round(time.process_time() - began, 1)
        ids_file.write_text(json.dumps(random.Random(SEED).sample(ids, 1000)))
    known = json.loads(ids_file.read_text())[:lookups]
    state = read_archive(store)
    for how in ("files", "key index"):
        index = _index(store, state, report) if how == "key index" else []
        with ThreadPoolExecutor(THREADS) as pool:

            def look(key: str, index: Any = index, pool: Any = pool) -> Any:
                wanted = Selection(key=key).among("topic", ["orders"])
                return lookup(store, wanted, state=state, index=index, spread=pool.map)

            keys = [row["keys"][0] for row in (look(text).rows.to_pylist()[0] for text in known)]
            groups = look("none").groups
            report |= {"row_groups": groups, "size_bytes": _size(store)}
            misses = [f"{text[:-1]}x" for text in known]
            for name, some in (("unique id", known), ("key", keys), ("miss", misses)):
                done = measured(some, look, [store])
                found = done.pop("found")
                report[f"{name}, by {how}"] = {**done, **pruned(found, groups)}
    for column, some in (("uniq_key", known), ("msg_key", keys)):
        questions = [f"SELECT * FROM orders WHERE {column} = '{key}'" for key in some[:10]]
        done = measured(questions, lambda question: ask(store, question).rows, [store])
        done.pop("found")
        report[f"duckdb, {column}"] = done
    return report


def _index(store: Counting, state: Any, report: dict[str, Any]) -> Any:
    began = time.process_time()
    built = build(store, state, alone(store))
    report["index_cpu_s"] = round(time.process_time() - began, 1)
    report["index_bytes"] = built.size_bytes
    store.take()
    found = read_index(store)
    report["index_objects"], report["index_head_requests"] = len(found), store.take()[0]
    return found


def _told(number: int) -> None:
    if number % 10 == 9:
        print(f"{number + 1} files", file=sys.stderr)


def _size(store: Counting) -> int:
    return sum(info.size_bytes for info in store.list("data/"))


def of_tier(folder: Path, messages: int, lookups: int) -> dict[str, Any]:
    """Step 3."""
    store, tier, target = folder / "store", f"file://{folder}/tier", f"file://{folder}/of-tier"
    if not (folder / "of-tier").exists():
        _tiered("bench", "make-store", store, f"--messages={messages}", "--body=256", "--queues=4")
        _tiered("attach", store, "--to", tier, "--once", "--seal")
        _tiered("archive", tier, "--to", target)
    objects, archive = open_counting(tier), open_counting(target)
    place = choose_place(objects, None, None)
    journal = JournalReader(objects, place.prefix, TierMachine())
    journal.catch_up()
    (topic,) = {queue.topic for queue in journal.state.queues}
    rng = random.Random(SEED)
    rows = ask(archive, f'SELECT uniq_key, keys FROM "{topic}" USING SAMPLE 1000').rows.to_pylist()
    some = [(row["keys"] or [row["uniq_key"]])[0] for row in rng.sample(rows, lookups)]
    state = read_archive(archive)
    build(archive, state, alone(archive))
    index = read_index(archive)
    report: dict[str, Any] = {"messages": messages}
    with ThreadPoolExecutor(THREADS) as pool:
        reader = IndexReader(objects, place.prefix, spread=pool.map)

        def by_index(key: str) -> int:
            return len(reader.lookup(journal.state, Wish(topic=topic, key=key)).hits)

        def by_filters(key: str) -> int:
            wanted = Selection(key=key).among("topic", [topic])
            done = lookup(archive, wanted, state=state, index=index, spread=pool.map)
            return done.rows.num_rows

        for kind, keys in (("hit", some), ("miss", [f"{key}-none" for key in some])):
            for name, do in (("index of the tier", by_index), ("archive", by_filters)):
                done = measured(keys, do, [objects, archive])
                done["found"] = sum(done["found"])
                report[f"{name}, {kind}"] = done
    return report


def _tiered(*arguments: object) -> None:
    command = [sys.executable, "-m", "tiered", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=50)
    options = parser.parse_args()
    folder = options.dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report = {"archive": of_archive(folder, options.files, options.rows, options.lookups)}
    if options.messages:
        report["tier"] = of_tier(folder, options.messages, options.lookups)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
