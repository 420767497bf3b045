"""``tiered policy``: the least that a role needs on a bucket, as a policy document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tiered.cli.errors import DONE
from tiered.cli.frame import COMMANDS, make_command

if TYPE_CHECKING:
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Print the document, whatever the form of output: it is to be handed on as it is."""
    from tiered.errors import InvalidError
    from tiered.upkeep.policies import ROLES, Grounds, policy

    role = call.argument("role")
    if role not in ROLES:
        raise InvalidError(f"no such role: {role!r}", do=f"name one of {', '.join(ROLES)}")
    grounds = Grounds(
        call.argument("url"),
        archive=call.text("archive"),
        cluster=call.text("cluster"),
        broker=call.text("broker"),
        kms_key=call.text("sse-kms-key-id"),
        region=call.text("region"),
    )
    call.stdout.write(f"{json.dumps(policy(role, grounds), indent=2)}\n".encode())
    call.stdout.flush()
    return DONE


COMMAND = make_command(
    "policy",
    run,
    summary=COMMANDS["policy"].summary,
    arguments=[click.Argument(["role"]), click.Argument(["url"])],
    examples=[
        "tiered policy writer s3://bucket/prefix > writer.json",
        "tiered policy archiver s3://bucket/prefix --archive s3://other-bucket/parquet",
    ],
)
