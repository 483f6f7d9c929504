"""Benchmarks: HTTP clients that know nothing of the server, and measurements inside the engine."""
