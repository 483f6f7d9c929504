"""The `armature` command: arguments, tables for people, and one function for each subcommand."""
