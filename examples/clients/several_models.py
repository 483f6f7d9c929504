"""Several models behind one address: find texts by their embeddings, rank them, and answer from the best one."""

import httpx
from openai import OpenAI

URL = "http://127.0.0.1:8000"
TEXTS = ["Foxes live in dens.", "The tenant pays on the first of each month.", "Whales breathe air."]
question = "When is the rent due?"
client = OpenAI(base_url=f"{URL}/v1", api_key="none")

question_vector, *vectors = (
    each.embedding for each in client.embeddings.create(model="embed", input=[question, *TEXTS]).data
)


def similarity(vector: list[float]) -> float:
    return sum(a * b for a, b in zip(question_vector, vector, strict=True))


order = sorted(range(len(TEXTS)), key=lambda place: similarity(vectors[place]), reverse=True)
found = [TEXTS[place] for place in order[:2]]

ranked = httpx.post(f"{URL}/v1/rerank", json={"model": "rerank", "query": question, "documents": found}).json()
best = found[ranked["results"][0]["index"]]

messages = [{"role": "user", "content": f"{best}\n\n{question}"}]
answer = client.chat.completions.create(model="chat", messages=messages, max_tokens=32)
print(best)
print(answer.choices[0].message.content)
