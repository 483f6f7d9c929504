"""Scheduler: which sequences run in a step, how many tokens of each, and KV cache allocation. Imports no torch."""
