"""A rebuild's plan as JSON: what people and scripts see, and what a plan file holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiered.errors import InvalidError
from tiered.log.rebuild import Proposal
from tiered.log.rebuild_life import Loss
from tiered.log.state import TierMachine
from tiered.log.tables import Refused
from tiered.log.verify_state import check_state
from tiered.model import MessageQueue
from tiered.upkeep.plans import load_plan, save_plan
from tiered.upkeep.rebuild import RebuildPlan

if TYPE_CHECKING:
    from tiered.api.broker_place import Place

WHAT = "rebuild"


def plan_document(plan: RebuildPlan, place: Place, url: str) -> dict[str, Any]:
    """What ``tiered rebuild --json`` shows."""
    proposal = plan.proposal
    lives = [life for all_of in proposal.state.queues.values() for life in all_of]
    parts = list(proposal.parts())
    return {
        "format": 1,
        "url": url,
        "cluster": place.cluster,
        "broker": place.broker,
        "is_needed": bool(plan.damage),
        "is_applied": False,
        "was_applied": False,
        "damage": plan.damage,
        "number": plan.number,
        "generation": proposal.state.generation,
        "queues": len(proposal.state.queues),
        "objects": plan.objects,
        "parts": len(parts),
        "messages": sum(part.count - part.holes for part in parts),
        "gaps": sum(len(life.gaps) for life in lives) - len(proposal.losses),
        "losses": [_loss(loss) for loss in proposal.losses],
        "orphans": proposal.orphans,
        "refused": [asdict(one) for one in plan.refused],
        "notes": proposal.notes,
    }


def _loss(loss: Loss) -> dict[str, Any]:
    return {
        "topic": loss.queue.topic,
        "queue_id": loss.queue.queue_id,
        "incarnation": loss.incarnation,
        "start": loss.start,
        "end": loss.end,
        "log_bytes": loss.log_bytes,
    }


def save_rebuild(plan: RebuildPlan, place: Place, url: str, path: str) -> None:
    """Write a plan file.

    Raises:
        InvalidError: It cannot be written.
    """
    document = plan_document(plan, place, url)
    document |= {"what": WHAT, "listing": plan.listing}
    save_plan(path, document | {"state": TierMachine().dump(plan.proposal.state)})


def load_rebuild(path: str, place: Place, url: str) -> RebuildPlan:
    """Read a plan file.

    Raises:
        InvalidError: It cannot be read, was changed, or is of another tier.
    """
    document = load_plan(path, WHAT, place)
    where = path
    if document.get("url") != url:
        raise InvalidError(f"this plan is of the tier at {document.get('url')}", where=where)
    try:
        plan = _plan_of(document)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidError(f"this is no plan of a rebuild: {error!r:.200}", where=where) from error
    problem = next(iter(check_state(plan.proposal.state)), None)
    if problem is not None:
        raise InvalidError(
            f"the plan contradicts itself: {problem.where}: {problem.detail}",
            where=where,
            do="plan again",
        )
    return plan


def _plan_of(document: dict[str, Any]) -> RebuildPlan:
    losses = [
        Loss(MessageQueue(loss.pop("topic"), loss.pop("queue_id")), **loss)
        for loss in document["losses"]
    ]
    proposal = Proposal(
        TierMachine().load(document["state"]), document["orphans"], losses, document["notes"]
    )
    return RebuildPlan(
        str(document["damage"]),
        int(document["number"]),
        {folder: list(row) for folder, row in document["listing"].items()},
        proposal,
        [Refused(**one) for one in document["refused"]],
        int(document["objects"]),
    )
