"""Copying committed messages from the local store to the tier. ``TieredDispatcher`` is the door."""
