"""llama.cpp API: completion in its own format, and properties of the server that its clients read."""
