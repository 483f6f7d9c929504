"""Model definitions in PyTorch, and the configurations they are built from."""
