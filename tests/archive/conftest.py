"""Sealed tiers, archives of them and a session of Spark."""

from support.archive_fixtures import archive_url, sealed, session, shop

__all__ = ["archive_url", "sealed", "session", "shop"]
