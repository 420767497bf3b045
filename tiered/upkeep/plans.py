"""Plan files: what a command that deletes was going to do, saved, shown, and carried out exactly so or not at all.

A plan is one JSON object: ``format``, ``what`` (the command), the tier (``cluster``, ``broker``, ``store``), the journal's
last entry (``journal_number``, ``journal_checksum``), what is to be done, and over all of it a ``checksum``, so that a file
that was edited or cut is refused. What else has to hold when it is carried out is each command's own business.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from zlib_ng import zlib_ng

from backends.local_files import advice_for, read_regular, write_regular
from tiered.crashpoints import reached
from tiered.errors import InvalidError, MovedOnError

if TYPE_CHECKING:
    from tiered.api.broker_place import Place

FORMAT = 1
Plan = dict[str, Any]


def save_plan(path: str, plan: Plan) -> None:
    """Write a plan file, readable for people.

    Raises:
        InvalidError: It cannot be written.
    """
    text = json.dumps({**plan, "checksum": _checksum(plan)}, indent=1) + "\n"
    try:
        write_regular(path, text.encode())
    except OSError as error:
        advice = advice_for(error, "name a file in a directory that can be written")
        raise InvalidError(
            f"the plan cannot be written: {error.strerror}", where=path, do=advice
        ) from error
    reached("plan-saved")


def load_plan(path: str, what: str, place: Place) -> Plan:
    """Read a plan file.

    Args:
        path: Of the file.
        what: The command that it must be of.
        place: The broker that it must be of.

    Raises:
        InvalidError: It cannot be read, was changed, or is of something else.
    """
    plan = _parsed(path)
    wrong = ""
    if plan.pop("checksum", None) != _checksum(plan):
        wrong = "it was changed or cut"
    elif plan.get("format") != FORMAT:
        wrong = f"its format {plan.get('format')} is not {FORMAT}"
    elif plan.get("what") != what:
        wrong = f"it is of `tiered {plan.get('what')}`"
    elif (plan.get("cluster"), plan.get("broker")) != (place.cluster, place.broker):
        wrong = f"it is of the tier of {plan.get('cluster')}/{plan.get('broker')}"
    if wrong:
        raise InvalidError(f"this plan cannot be used: {wrong}", where=path, do="plan again")
    return plan


def was_applied(planned: int, done: int, done_before: int) -> bool:
    """Whether all of a plan with work had been carried out before this run."""
    return planned > 0 and done == 0 and done_before == planned


def digest(plan: Plan) -> Plan:
    """What the ledger keeps of a plan: its plain values, how long its lists are, and a digest that tells the plan's file."""
    plain = {name: value for name, value in plan.items() if not isinstance(value, list | dict)}
    counts = {name: len(value) for name, value in plan.items() if isinstance(value, list | dict)}
    return {**plain, "counts": counts, "sha256": hashlib.sha256(_text(plan)).hexdigest()}


def moved_on(why: str, where: str = "") -> MovedOnError:
    """The tier is not any more what the plan was made of."""
    what = f"the tier has moved on since this was planned: {why}"
    return MovedOnError(what, where=where, do="nothing more is changed; plan again")


def _parsed(path: str) -> Plan:
    try:
        plan = json.loads(read_regular(path))
    except OSError as error:
        raise InvalidError(f"the plan cannot be read: {error.strerror}", where=path) from error
    except (ValueError, RecursionError):
        plan = None
    if not isinstance(plan, dict):
        raise InvalidError("this is no plan", where=path, do="give a file that --plan has written")
    return plan


def _checksum(plan: Plan) -> int:
    return zlib_ng.crc32(_text(plan))


def _text(plan: Plan) -> bytes:
    return json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
