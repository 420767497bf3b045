"""Cold reads from the tier. Home of TieredMessageFetcher; for now the plain sequential reader lives in ``tiered.log``."""

__distribution__ = "tieredmq"
