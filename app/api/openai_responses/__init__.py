"""OpenAI Responses API, stateless: each request carries its whole conversation."""
