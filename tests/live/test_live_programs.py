"""An exported program as its users meet it: `armature serve`, the protocol's own client, neighbours whose inputs are bad."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import torch
import tritonclient.http as triton

from exported_programs import model_of, write_program
from tests.live.live_server import PATIENCE, ServerProcess, server_process, until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = write_program(tmp_path_factory.mktemp("programs"), "recommender")
    with server_process(path, "--precision", "fp32") as server:
        url = _when_ready(server)
        yield url


def _when_ready(server: ServerProcess) -> str:
    url = server.url()
    until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
    return url


def inputs(rows: int, seed: int = 0) -> tuple[Any, Any]:
    deck = numpy.random.default_rng(seed)
    return deck.integers(0, 50, (rows, 5)), deck.standard_normal((rows, 8), dtype=numpy.float32)


def expected(ids: Any, dense: Any) -> dict[str, Any]:
    with torch.inference_mode():
        found = model_of("recommender")(torch.from_numpy(ids), torch.from_numpy(dense))
    return {name: tensor.numpy() for name, tensor in found.items()}


def asked(ids: Any, dense: Any, binary: bool = True) -> list[triton.InferInput]:
    tensors = [
        triton.InferInput("ids", list(ids.shape), "INT64"),
        triton.InferInput("dense", list(dense.shape), "FP32"),
    ]
    tensors[0].set_data_from_numpy(ids, binary_data=binary)
    tensors[1].set_data_from_numpy(dense, binary_data=binary)
    return tensors


@pytest.mark.full
@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_finds_it_and_gets_what_the_model_gives(served: str, binary: bool) -> None:
    with triton.InferenceServerClient(served.removeprefix("http://")) as client:
        assert client.is_server_ready() and client.is_model_ready("recommender")
        metadata = client.get_model_metadata("recommender")
        assert [(item["name"], item["datatype"], item["shape"]) for item in metadata["inputs"]] == [
            ("ids", "INT64", [-1, 5]),
            ("dense", "FP32", [-1, 8]),
        ]
        ids, dense = inputs(3)
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("score", "features")]
        answer = client.infer("recommender", asked(ids, dense, binary), outputs=outputs)
    for name, wanted in expected(ids, dense).items():
        numpy.testing.assert_allclose(answer.as_numpy(name), wanted, rtol=1e-4, atol=1e-5)


def test_a_crowd_shares_steps_and_a_bad_neighbour_harms_nobody(served: str) -> None:
    url = f"{served}/v2/models/recommender/infer"

    def ask(number: int) -> httpx.Response:
        ids, dense = inputs(1 + number % 3, seed=number)
        if number % 7 == 3:
            ids[0, 0] = 50  # no such item
        tensors = [
            {"name": "ids", "datatype": "INT64", "shape": list(ids.shape), "data": ids.ravel().tolist()},
            {"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense.ravel().tolist()},
        ]
        return httpx.post(url, json={"inputs": tensors, "outputs": [{"name": "score"}]}, timeout=PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(40)))
    for number, answer in enumerate(answers):
        if number % 7 == 3:
            assert answer.status_code == 400
            assert "cannot compute these inputs" in answer.json()["error"]
        else:
            assert answer.status_code == 200, answer.text
            wanted = expected(*inputs(1 + number % 3, seed=number))["score"]
            numpy.testing.assert_allclose(answer.json()["outputs"][0]["data"], wanted.ravel(), rtol=1e-4, atol=1e-5)


def test_it_is_counted_as_everything_else(served: str) -> None:
    text = httpx.get(f"{served}/metrics").text
    assert 'armature_step_seconds_count{phase="encode"}' in text
    assert 'armature_requests_total{api="oip"' in text
    info = httpx.get(f"{served}/info").json()
    assert info["plan"]["kv_cache_bytes"]["value"] == 0


def test_what_only_text_models_do_is_refused(served: str) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/generate", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = httpx.post(served + path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["code"] == "wrong_model_kind"


@pytest.mark.full
def test_an_archive_that_needs_unpickling_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "old.pt2").write_bytes(b"PK not really")
    with server_process(tmp_path / "old.pt2") as server:
        status, said = server.finish()
    assert status == 2
    assert "old.pt2 is not an archive of torch.export.save" in said
