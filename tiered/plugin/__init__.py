"""Composition root: builds the parts and wires them. ``open`` is the door of the API; ``attach`` starts tiering.

from tiered.plugin import open
tier = open("s3://bucket/prefix")
for message in tier.read("Orders", 3, start=1200): ...
"""

from __future__ import annotations

from tiered.plugin.tier import Tier, open  # noqa: A004 (the API's door)

__all__ = ["Tier", "open"]
