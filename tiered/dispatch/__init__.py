"""Copying committed messages from the local store to the tier. Entry point: ``TieredDispatcher``."""
