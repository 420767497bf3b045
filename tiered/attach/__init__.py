"""A writer attached to a running store: what it finds out at its start, runs beside dispatch, and tells of itself."""
