"""Engines of models that the library transformers computes."""
