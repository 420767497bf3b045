"""``tiered doctor``: what is set up wrong, and what to do about it."""

from __future__ import annotations

import contextlib
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tiered.cli.errors import DONE, NEEDS_A_PERSON, UNREACHABLE
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output

if TYPE_CHECKING:
    from tiered.cli.call import Call
    from tiered.local.face import LocalStore


def run(call: Call) -> int:
    """Look and print."""
    from tiered.api.stores import backend_errors
    from tiered.cli.tiers import open_objects
    from tiered.upkeep.doctor import FAIL, REACHABILITY, examine
    from tiered.upkeep.doctor_place import trial_store

    probe_id = f"{random.SystemRandom().getrandbits(64):016x}"
    output, url, directory = Output(call), call.argument("url"), call.text("store")

    def open_local() -> LocalStore:
        from tiered.local.rocketmq import RocketMQStore

        return RocketMQStore.open(directory or "", clock=call.clock)

    with contextlib.ExitStack() as stack, backend_errors():
        store = open_objects(call, url, stack)
        trial = stack.enter_context(trial_store(url, store, probe_id, is_new=call.flag("new")))
        checks = list(
            examine(
                url,
                store,
                call.s3_options(),
                clock=call.clock,
                probe_id=probe_id,
                trial=trial,
                open_local=open_local if directory else None,
            )
        )
        where = store.url
    failed = [check.name for check in checks if check.status == FAIL]
    rows = [asdict(check) for check in checks]
    document = {"format": 1, "url": where, "is_ok": not failed, "checks": rows}
    output.emit(document, rows, ["name", "status", "detail", "advice"])
    if REACHABILITY in failed:
        return UNREACHABLE
    return NEEDS_A_PERSON if failed else DONE


COMMAND = make_command(
    "doctor",
    run,
    summary=COMMANDS["doctor"].summary,
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered doctor s3://bucket/prefix",
        "tiered doctor file:///tmp/tier --store /data/rocketmq/store --json",
    ],
)
