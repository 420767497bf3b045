"""Captured stores, archives of them and a session of Spark, as tests of archives have them."""

from tests.archive.conftest import archive_url, sealed, session, shop, stores

__all__ = ["archive_url", "sealed", "session", "shop", "stores"]
