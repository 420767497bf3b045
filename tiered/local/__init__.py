"""Readers of local message stores: a broker's directory, live or dead. ``tiered.local.interface`` is what others see."""
