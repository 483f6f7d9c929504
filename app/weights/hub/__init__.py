"""Models by the names of Hugging Face's hub: its cache on this machine, and fetching into it by `huggingface_hub`."""
