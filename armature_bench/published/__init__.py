"""Figures that others published, measured again on this machine."""
