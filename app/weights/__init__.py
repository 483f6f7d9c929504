"""Checkpoints: opening, checking, loading, packing and caching weights."""
