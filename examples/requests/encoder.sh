# Embeddings, reranking and the Open Inference Protocol. Needs: armature serve --model bert
curl -s http://127.0.0.1:8000/v1/embeddings -H 'content-type: application/json' -d '{"input": ["A fox in the snow.", "Winter animals"]}'
curl -s http://127.0.0.1:8000/v1/rerank -H 'content-type: application/json' -d '{"query": "winter", "documents": ["A fox in the snow.", "Bread and butter"]}'
curl -s http://127.0.0.1:8000/v2/models/bert/infer -H 'content-type: application/json' \
  -d '{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["A fox in the snow."]}], "outputs": [{"name": "embedding"}]}'
