"""A writer attached to a running store: its start, the threads beside dispatch, and its metrics."""
