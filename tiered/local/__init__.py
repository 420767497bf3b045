"""Readers of local message stores: a broker's directory, live or dead. ``tiered.local.interface`` is its interface."""
