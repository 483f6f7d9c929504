"""The command `armature`, and `python -m armature`. The server itself is the package `app` beside this one."""
