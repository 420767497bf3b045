"""The embedded store: our own writer of the RocketMQ store format. ``tiered.store.embedded`` is its face."""
