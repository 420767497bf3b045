"""The ordered metadata of a tier, its source of truth: append, replay, checkpoint, lease.

One implementation with several roots: the tier's own state machine is ``tiered.log.state``; archive and compaction bring
theirs. docs/formats/journal.md has the layout.
"""
