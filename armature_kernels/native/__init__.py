"""The native library: loading, operations, recorded steps and memory."""
