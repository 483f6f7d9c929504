"""Searches texts by their vectors. Needs: armature serve --model bert (or an embedding model), openai, faiss-cpu."""

import faiss
import numpy
from openai import OpenAI

TEXTS = ["A fox in the snow.", "Bread and butter.", "How to mend a bicycle.", "Winter animals."]
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


def vectors(texts):
    return numpy.array([one.embedding for one in client.embeddings.create(model="bert", input=texts).data], "float32")


found = vectors(TEXTS)
index = faiss.IndexFlatIP(found.shape[1])  # vectors have length 1, so their product is the cosine
index.add(found)
scores, places = index.search(vectors(["A fox in the snow."]), 2)
print([(TEXTS[place], round(float(score), 3)) for score, place in zip(scores[0], places[0], strict=True)])
