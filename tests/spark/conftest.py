"""Sealed tiers, archives of them, a session of Spark, and a tier that streams read."""

from support.archive_fixtures import archive_url, sealed, session, shop
from support.streams import place

__all__ = ["archive_url", "place", "sealed", "session", "shop"]
