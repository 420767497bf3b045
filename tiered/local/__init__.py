"""Readers (and one writer) of local message stores. ``tiered.local.face`` is what the layers above see."""
