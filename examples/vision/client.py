"""Asks for the labels of a picture: `python client.py PICTURE`. Needs httpx, and tritonclient[http] for binary data."""

import base64
import sys
from pathlib import Path

import httpx
import numpy
import tritonclient.http as triton

URL = "http://127.0.0.1:8000"
picture = Path(sys.argv[1]).read_bytes()

# The file itself, as to TorchServe: the probabilities of the best labels.
best = httpx.post(f"{URL}/predictions/vision", content=picture, headers={"content-type": "image/jpeg"})
print(best.raise_for_status().json())

# Several pictures in one JSON object, as to KServe: the rows of the output.
instances = [{"b64": base64.b64encode(picture).decode()}] * 2
answer = httpx.post(f"{URL}/v1/models/vision:predict", json={"instances": instances})
print(answer.raise_for_status().json()["predictions"])

# The Open Inference Protocol, files and results as bytes: the two best classes of each picture.
with triton.InferenceServerClient(URL.removeprefix("http://")) as client:
    image = triton.InferInput("image", [2], "BYTES")
    image.set_data_from_numpy(numpy.array([picture, picture], dtype=numpy.object_))
    wanted = triton.InferRequestedOutput("logits", class_count=2)
    print(client.infer("vision", [image], outputs=[wanted]).as_numpy("logits"))
