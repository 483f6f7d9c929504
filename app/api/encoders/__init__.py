"""Embeddings, rerank and classify routes."""
