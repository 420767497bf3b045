"""Readers of local message stores: a broker's directory, live or dead. ``tiered.local.face`` is what layers above see."""
