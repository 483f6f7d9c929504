"""Tasks besides generation in the form of Hugging Face's inference API."""
