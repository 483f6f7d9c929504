"""Armature: serve one model over HTTP at the full speed of the machine."""
