"""Plan: decide device, dtypes, memory, threads and batch sizes, each with its reason."""
