"""A tier served read-only over the broker's own protocol, to RocketMQ's unchanged clients. docs/mount.md is the guide."""
