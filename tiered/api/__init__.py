"""A tier opened for reading, for programs: messages, Arrow, asyncio. Entry point: ``tiered.open``."""
