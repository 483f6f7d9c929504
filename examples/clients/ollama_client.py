"""Ollama's Python client."""

import ollama

client = ollama.Client(host="http://127.0.0.1:8000")
answer = client.chat(model="armature", messages=[{"role": "user", "content": "Write fox into made.txt."}])
print(answer.message.content)
