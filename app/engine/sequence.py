"""A request's life inside the engine: its tokens, how many of them are computed, and how it ended. Owned by the worker thread."""
