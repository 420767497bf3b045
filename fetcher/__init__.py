"""Cold reads from the tier: TieredMessageFetcher. The plain sequential reader is in ``tiered.log``."""

__distribution__ = "tieredmq"
