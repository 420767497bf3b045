"""The embedded store: our own writer of the RocketMQ store format. ``tiered.store.message_store`` is its face."""
