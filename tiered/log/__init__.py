"""The tier's logs: segments, flat files, commit log, consume queue, and the state that the journal gives them."""
