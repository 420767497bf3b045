"""``tiered doctor`` and ``tiered policy``: what is set up wrong and what to do about it; and the least that a role needs."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON, UNREACHABLE
from tiered.cli.frame import command
from tiered.cli.options import argument, flag, option
from tiered.cli.output import show

if TYPE_CHECKING:
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What ``tiered doctor`` can be told."""

    url: str = argument()
    new: bool = flag("check a place for a new tier; a folder may be missing, its parent not")
    store: str | None = option("also check this local store", kinds.DIR)


@command("doctor", DoctorOptions)
def run(call: Call, options: DoctorOptions) -> int:
    """Finds what is set up wrong, and says what to do.

    Examples:
        tiered doctor s3://bucket/prefix
        tiered doctor file:///tmp/tier --store /data/rocketmq/store --json
    """
    from tiered.upkeep.doctor import FAIL, REACHABILITY, examine, trial_store

    probe_id = f"{random.SystemRandom().getrandbits(64):016x}"
    url, directory = options.url, options.store

    def open_local() -> LocalStore:
        from tiered.local.sources import open_store

        return open_store(directory or "", clock=call.clock)

    store = call.objects(url)
    with trial_store(url, store, probe_id, is_new=options.new) as trial:
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
    failed = [check.name for check in checks if check.status == FAIL]
    rows = [asdict(check) for check in checks]
    document = {"format": 1, "url": store.url, "is_ok": not failed, "checks": rows}
    show(call, document, rows=rows, columns=["name", "status", "detail", "advice"])
    if REACHABILITY in failed:
        return UNREACHABLE
    return NEEDS_A_PERSON if failed else DONE


# --------------------------------------------------------------------------------------------------
# ``tiered policy``: the least that a role needs on a bucket, as a policy document.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What ``tiered policy`` can be told."""

    role: str = argument("writer, reader, archiver, reclaimer, eraser, timekeeper or mounter")
    url: str = argument()
    archive: str | None = option("where an archiver writes", kinds.URL)


@command("policy", PolicyOptions)
def run_policy(call: Call, options: PolicyOptions) -> int:
    """Prints the S3 policy that a role needs.

    Examples:
        tiered policy writer s3://bucket/prefix > writer.json
        tiered policy archiver s3://bucket/prefix --archive s3://other-bucket/parquet
    """
    from tiered.errors import InvalidError
    from tiered.upkeep.doctor import ROLES, Grounds, policy

    role = options.role
    if role not in ROLES:
        raise InvalidError(f"no such role: {role!r}", do=f"name one of {', '.join(ROLES)}")
    grounds = Grounds(
        options.url,
        archive=options.archive,
        cluster=call.common.cluster,
        broker=call.common.broker,
        kms_key=call.common.sse_kms_key_id,
        region=call.common.region,
    )
    call.stdout.write(f"{json.dumps(policy(role, grounds), indent=2)}\n".encode())
    call.stdout.flush()
    return DONE
