"""Devices: how attention, memory and queues work on each."""
