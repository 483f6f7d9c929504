"""Commands that talk to a server in a terminal: `armature chat` and `armature top`."""
