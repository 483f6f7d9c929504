# llama.cpp's routes.
curl -s http://127.0.0.1:8000/completion -d '{"prompt": "Once upon a time", "n_predict": 20}'
curl -s http://127.0.0.1:8000/props
