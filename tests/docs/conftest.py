"""A session of Spark, for pages that take one for given."""

from support.archive_fixtures import session

__all__ = ["session"]
