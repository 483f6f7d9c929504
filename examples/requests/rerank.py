"""Cohere's client: documents in order of relevance."""

import cohere

client = cohere.ClientV2(api_key="none", base_url="http://127.0.0.1:8000")
ranked = client.rerank(model="bert", query="winter", documents=["A fox in the snow.", "Bread and butter"])
print([(each.index, each.relevance_score) for each in ranked.results])
