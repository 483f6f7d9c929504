"""`armature bench tco`: machines and dollars for a given load."""
