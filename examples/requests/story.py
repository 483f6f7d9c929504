"""Any OpenAI client works unchanged: a streamed chat."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
story = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a story about a fox."}],
    max_tokens=80,
    stream=True,
)
for chunk in story:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
