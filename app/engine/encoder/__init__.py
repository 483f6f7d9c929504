"""Encoder engine: dynamic batching and model runners."""
