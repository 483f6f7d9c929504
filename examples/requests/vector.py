"""Hugging Face's client: the vector of a text."""

from huggingface_hub import InferenceClient

print(InferenceClient(model="http://127.0.0.1:8000").feature_extraction("A fox in the snow.").shape)
