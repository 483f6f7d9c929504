"""Ollama API: chat, generation and embeddings with the served model, and its description."""
