"""Commands that go over several brokers of a tier: one flow for all of them.

Overview: ``over_brokers`` runs a command as if it were called for each broker by its names, a few at once. What each
prints is a document that is kept, and what it says on stderr begins with the broker's name. The result is a row a broker,
the worst first; with JSON each row has the broker's own document as ``result``.

Errors: what ends a command for one broker is that broker's row, and ends none of the others. The exit code is the greatest.

Threads: a command of one broker runs in one thread, with stores of its own.
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tiered.cli.call import Results
from tiered.cli.exits import explain
from tiered.cli.output import Row, show
from tiered.cli.values import broker_filter
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.api.broker_place import Place
    from tiered.cli.call import Call
    from tiered.cli.options import BrokersOptions

T = TypeVar("T", bound="BrokersOptions")


class _RowsKept(Results):
    """Keeps the document of one broker."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._chunks.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        return False

    @property
    def document(self) -> dict[str, Any] | None:
        """What was printed; None: nothing was."""
        return json.loads(b"".join(self._chunks)) if self._chunks else None


def over_brokers(run: Callable[[Call, T], int], call: Call, options: T) -> int:
    """Run a command for each broker that is meant; the greatest exit code.

    Raises:
        InvalidError: No broker fits, or an option is of one broker alone.
    """
    for name in options.of_one_broker():
        raise InvalidError(
            f"--{name} is of one broker",
            where=call.path,
            do="leave it out, or name the broker with --cluster and --broker",
        )
    places = _places(call, options)
    with (
        ThreadPoolExecutor(options.brokers_at_once, "tiered-broker") as pool,
        call.progress(call.section, f"{len(places)} brokers") as progress,
    ):
        rows: list[Row] = []
        for row in pool.map(lambda place: _run_one(run, call, options, place), places):
            rows.append(row)
            progress.tell(f"{len(rows)} of {len(places)} brokers", len(rows), len(places))
    rows.sort(key=lambda row: -row["exit_code"])
    code: int = max(row["exit_code"] for row in rows)
    document = {"format": 1, "url": options.url, "exit_code": code, "brokers": rows}
    flat = [_flat(row, options.broker_columns) for row in rows]
    columns = ["cluster", "broker", "exit_code", *options.broker_columns, "reason", "message"]
    show(call, document, rows=flat, columns=columns)
    return code


def _places(call: Call, options: BrokersOptions) -> list[Place]:
    from tiered.api.broker_place import SIGNS, TIMER_SIGNS, find_places, no_tier

    store, takes = call.objects(options.url), broker_filter(options.brokers)
    signs = TIMER_SIGNS if getattr(options, "timers", False) else SIGNS
    found = find_places(store, signs)
    if not found:
        raise no_tier(store)
    fitting = [one for one in found if call.common.cluster in {None, one.cluster} and takes(one)]
    if not fitting:
        raise InvalidError(
            "no broker fits --brokers",
            where=store.url,
            do="`tiered status URL` lists the brokers",
        )
    return fitting


def _run_one(run: Callable[[Call, T], int], call: Call, options: T, place: Place) -> Row:
    from tiered.api.stores import backend_errors

    kept = _RowsKept()
    common = replace(
        call.common, cluster=place.cluster, broker=place.broker, output="json", json=False
    )
    of_one = replace(
        call,
        common=common,
        stdout=kept,
        opened=contextlib.ExitStack(),
        speaks_for=f"{place.cluster}/{place.broker}",
    )
    row: Row = {"cluster": place.cluster, "broker": place.broker, "exit_code": 0, "error": None}
    try:
        with backend_errors(), of_one.opened:
            row["exit_code"] = run(of_one, options)
    except Exception as error:  # noqa: BLE001 (a broker's failure is its row)
        told = explain(error)
        row["exit_code"] = told.exit_code
        row["error"] = {"reason": told.reason, "message": told.line}
    return {**row, "result": kept.document}


def _flat(row: Row, columns: tuple[str, ...]) -> Row:
    """For a table: what a broker's document has under these names, and why it failed."""
    result, error = row["result"] or {}, row["error"] or {}
    named = {name: row[name] for name in ("cluster", "broker", "exit_code")}
    return {**named, **{name: result.get(name) for name in columns}, **error}
