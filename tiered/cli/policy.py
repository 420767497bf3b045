"""``tiered policy``: the least that a role needs on a bucket, as a policy document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.cli.errors import DONE
from tiered.cli.frame import make_command
from tiered.cli.options import argument, option

if TYPE_CHECKING:
    from tiered.cli.call import Call


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What ``tiered policy`` can be told."""

    role: str = argument()
    url: str = argument()
    archive: str | None = option(
        "for an archiver: where it writes", "URL", str, default_text="none"
    )


def run(call: Call, options: PolicyOptions) -> int:
    """Print the document, whatever the form of output: it is to be handed on as it is."""
    from tiered.errors import InvalidError
    from tiered.upkeep.policies import ROLES, Grounds, policy

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


COMMAND = make_command(
    "policy",
    PolicyOptions,
    run,
    examples=[
        "tiered policy writer s3://bucket/prefix > writer.json",
        "tiered policy archiver s3://bucket/prefix --archive s3://other-bucket/parquet",
    ],
)
