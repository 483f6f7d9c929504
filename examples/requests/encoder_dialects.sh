# Bodies of text-embeddings-inference, Cohere, vLLM and Triton. Needs: armature serve --model bert
curl -s http://127.0.0.1:8000/embed -H 'content-type: application/json' -d '{"inputs": ["A fox in the snow.", "Winter animals"], "truncate": true}'
curl -s http://127.0.0.1:8000/v2/embed -H 'content-type: application/json' -d '{"texts": ["A fox in the snow."], "input_type": "search_document", "embedding_types": ["ubinary"]}'
curl -s http://127.0.0.1:8000/v2/rerank -H 'content-type: application/json' -d '{"query": "winter", "documents": ["A fox in the snow.", "Bread and butter"], "top_n": 1}'
curl -s http://127.0.0.1:8000/score -H 'content-type: application/json' -d '{"text_1": "winter", "text_2": ["A fox in the snow.", "Bread and butter"]}'
curl -s http://127.0.0.1:8000/pooling -H 'content-type: application/json' -d '{"input": "A fox in the snow.", "task": "token_embed"}'
curl -s http://127.0.0.1:8000/decode -H 'content-type: application/json' -d '{"ids": [[101, 102]], "skip_special_tokens": false}'
curl -s http://127.0.0.1:8000/v2/models/bert/stats
