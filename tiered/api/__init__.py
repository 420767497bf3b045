"""A tier opened for reading, for programs: messages, Arrow, asyncio. ``tiered.open`` is the door."""
