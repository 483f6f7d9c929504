"""`armature bench compare`: measure one machine and write a result file."""
