"""The embedded store: our own writer of the RocketMQ store format. Entry point: ``tiered.store.embedded``."""
