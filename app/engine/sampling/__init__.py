"""Sampling of the next token on the CPU and on a device."""
