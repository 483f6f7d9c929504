"""Probe: read facts about processor, memory, accelerators and installed software."""
