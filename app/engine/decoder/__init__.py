"""Decoder engine: step loop, model runners and KV caches."""
