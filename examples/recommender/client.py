"""Ranks candidates for a user, and shows what an id outside of a table gets. Needs httpx and numpy."""

import httpx
import numpy

URL = "http://127.0.0.1:8000/v2/models/recommender/infer"


def rank(user, items):
    """Return the items, the best first."""
    context = numpy.zeros((len(items), 8), numpy.float32)
    tensors = [
        {"name": "user", "datatype": "INT64", "shape": [len(items)], "data": [user] * len(items)},
        {"name": "item", "datatype": "INT64", "shape": [len(items)], "data": items},
        {"name": "context", "datatype": "FP32", "shape": list(context.shape), "data": context.ravel().tolist()},
    ]
    answer = httpx.post(URL, json={"inputs": tensors})
    if answer.is_client_error:  # such as an id that no table has: this request alone
        raise ValueError(answer.json()["error"])
    scores = answer.raise_for_status().json()["outputs"][0]["data"]
    return [item for _, item in sorted(zip(scores, items, strict=True), reverse=True)]


print(rank(7, [1, 20, 300, 4000, 49_999]))
try:
    rank(7, [50_000])
except ValueError as error:
    print(error)
