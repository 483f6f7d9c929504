"""Asynchronous service between HTTP and the engine: admission, tokenization, answers and predicted wait."""
