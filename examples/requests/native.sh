# The native routes have the smallest bodies, and accept and return token ids; information and metrics.
curl -s http://127.0.0.1:8000/generate -H 'content-type: application/json' -d '{"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}'
curl -s http://127.0.0.1:8000/info
curl -s http://127.0.0.1:8000/metrics
