"""Encoder models: BERT-like bodies, pooling and heads."""
