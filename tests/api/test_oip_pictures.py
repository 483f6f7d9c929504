"""Programs whose description names pictures and labels: files in each body, version 1, TorchServe and classes."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from app.api.oip.predictions import best_labels, class_strings
from app.api.oip.tensors import to_strings
from app.errors import CheckpointInvalid, InvalidRequest
from app.messages import Signature, TensorSpec
from app.service.program_pictures import picture_rows
from app.weights.program_description import PictureSpec, ProgramDescription, read_description
from tests.api.oip_fakes import Served, fp32, program, serving, tensor

SIGNATURE = Signature((TensorSpec("pixels", "FP32", (-1, 3, 2, 4)),), (TensorSpec("sum", "FP32", (-1,)),))
SPEC = PictureSpec("pixels", "FP32", (3, 2, 4), 3, (2, 4), 4)


def picture(color: str = "white", size: tuple[int, int] = (8, 6), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    model = replace(program(SIGNATURE), description=ProgramDescription({"pixels": SPEC}))
    async with serving(model) as server:
        yield server


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("kind", "color", "value"), [("PNG", "white", 24.0), ("JPEG", "white", 24.0), ("PNG", "black", 0.0)]
)
async def test_a_body_that_is_a_picture(served: Served, kind: str, color: str, value: float) -> None:
    content = picture(color, kind=kind)
    response = await served.client.post(
        f"{served.path}/infer", content=content, headers={"content-type": f"image/{kind.lower()}"}
    )
    assert response.json()["outputs"] == [{"name": "sum", "datatype": "FP32", "shape": [1], "data": [value]}]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
async def test_pictures_in_json_are_base64(served: Served, prefix: str) -> None:
    files = [prefix + b64(picture(color)) for color in ("white", "black")]
    response = await served.infer([tensor("pixels", "BYTES", [2], files)])
    assert response.json()["outputs"][0]["data"] == [24.0, 0.0]
    (order,) = served.orders
    assert (order.inputs["pixels"].datatype, order.inputs["pixels"].shape) == ("FP32", (2, 3, 2, 4))


async def test_pictures_behind_the_json_are_files(served: Served) -> None:
    tail = b"".join(struct.pack("<I", len(one)) + one for one in (picture(), picture("black")))
    response = await served.infer([tensor("pixels", "BYTES", [2], binary_data_size=len(tail))], tail)
    assert response.json()["outputs"][0]["data"] == [24.0, 0.0]


async def test_numbers_are_taken_as_before(served: Served) -> None:
    response = await served.infer([tensor("pixels", "FP32", [1, 3, 2, 4], [1.0] * 24)])
    assert response.json()["outputs"][0]["data"] == [24.0]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (tensor("pixels", "BYTES", [1], ["no base64!"]), "pixels[0] is neither a picture nor base64"),
        (tensor("pixels", "BYTES", [1], [b64(b"hello")]), "pixels[0] is not a picture that is known here"),
        (tensor("pixels", "BYTES", [1], [b64(picture()[:50])]), "pixels[0] is a damaged picture"),
        (tensor("pixels", "BYTES", [1, 1], [b64(picture())]), "pictures have the shape [n], not [1, 1]"),
        (tensor("pixels", "BYTES", [0], []), "The inputs are empty"),
        (tensor("other", "BYTES", [1], [b64(picture())]), "no input 'other'"),
    ],
)
async def test_what_is_no_picture_is_refused(served: Served, inputs: Any, said: str) -> None:
    response = await served.infer([inputs])
    assert response.status_code == 400 and said in response.json()["error"], response.text
    assert served.orders == []


async def test_sizes_are_checked_before_pixels_are_read(served: Served) -> None:
    content = picture()
    header = content[:16] + struct.pack(">II", 60_000, 60_000) + content[24:]
    response = await served.client.post(f"{served.path}/infer", content=header, headers={"content-type": "image/png"})
    assert response.status_code == 400, response.text
    assert "60000 x 60000 pixels, and may have 64,000,000" in response.json()["error"] or "picture" in response.text


@pytest.mark.parametrize("instances", [[{"b64": b64(picture())}], [{"pixels": {"b64": b64(picture())}}]])
async def test_version_1_of_kserves_protocol(served: Served, instances: list[Any]) -> None:
    response = await served.client.post("/v1/models/tiny:predict", json={"instances": instances})
    assert response.json() == {"predictions": [24.0]}, response.text
    numbers = [[[[1.0] * 4] * 2] * 3, [[[0.5] * 4] * 2] * 3]
    response = await served.client.post("/v1/models/tiny:predict", json={"instances": numbers})
    assert response.json() == {"predictions": [24.0, 12.0]}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/models/tiny:predict", {"instances": []}, 400, "instances"),
        ("/v1/models/tiny:predict", {"instances": [{"pixels": 1, "more": 2}]}, 400, "and nothing else (more)"),
        ("/v1/models/tiny:predict", {"instances": [{"b64": 7}]}, 400, 'a picture is {"b64"'),
        ("/v1/models/tiny:predict", {"instances": [[1.0]]}, 400, "must have the shape"),
        ("/v1/models/tiny:predict", {"inputs": []}, 400, "send instances here"),
        (
            "/predictions/tiny",
            {"instances": [[1.0]], "signature_name": "other"},
            400,
            "signature_name is not supported",
        ),
        ("/v1/models/other:predict", {"instances": [1]}, 404, "other"),
    ],
)
async def test_instances_that_do_not_fit_are_refused(
    served: Served, path: str, body: Any, status: int, said: str
) -> None:
    response = await served.client.post(path, json=body)
    assert response.status_code == status and said in response.json()["error"], response.text


async def test_torchserves_route(served: Served) -> None:
    response = await served.client.post("/predictions/tiny", content=picture(), headers={"content-type": "image/png"})
    assert response.json() == 24.0, response.text
    response = await served.client.post("/predictions/tiny", json={"instances": [{"b64": b64(picture())}]})
    assert response.json() == {"predictions": [24.0]}


async def test_the_metadata_says_which_inputs_take_pictures(served: Served) -> None:
    (found,) = (await served.client.get(served.path)).json()["inputs"]
    assert found == {"name": "pixels", "datatype": "FP32", "shape": [-1, 3, 2, 4], "parameters": {"picture": True}}


async def test_classes_need_a_row_of_values(served: Served) -> None:
    asked = [{"name": "sum", "parameters": {"classification": 2}}]
    response = await served.infer([tensor("pixels", "FP32", [1, 3, 2, 4], [1.0] * 24)], outputs=asked)
    assert response.status_code == 400 and "classification needs a row of FP32" in response.json()["error"]


def test_the_best_classes_are_tritons_strings() -> None:
    rows = fp32(0.5, 2.0, 1.0, 3.0, -1.0, 3.0, shape=(2, 3))
    assert to_strings("x", class_strings(rows, 2, ("cat", "dog", "a:b"))) == [
        "2.000000:1:dog",
        "1.000000:2:a:b",
        "3.000000:0:cat",
        "3.000000:2:a:b",
    ]
    assert to_strings("x", class_strings(rows, 1)) == ["2.000000:1", "3.000000:0"]


def test_torchserve_gets_probabilities_of_labels() -> None:
    import json

    labels = replace(program(), description=ProgramDescription(labels={"logits": ("cat", "dog")}))
    found = json.loads(best_labels(labels, {"logits": fp32(0.0, 1.0986123, shape=(1, 2))}))
    assert list(found) == ["dog", "cat"]
    assert found["dog"] == pytest.approx(0.75)


# ---- the rows --------------------------------------------------------------------------------------------------------


def gradient(width: int, height: int) -> bytes:
    file = io.BytesIO()
    image = Image.new("RGB", (width, height))
    image.putdata([(5 * x % 256, 7 * y % 256, (x * y) % 256) for y in range(height) for x in range(width)])
    image.save(file, "PNG")
    return file.getvalue()


def test_too_many_pictures_are_refused_before_they_are_read() -> None:
    large = replace(SPEC, shape=(3, 2000, 2000), crop=(2000, 2000), resize=2000)
    with pytest.raises(InvalidRequest, match="2 pictures take 91 MiB, and may take 64"):
        picture_rows(large, [b"never read"] * 2)


# ---- the description -------------------------------------------------------------------------------------------------

INPUTS = (TensorSpec("image", "FP32", (-1, 3, 224, 224)), TensorSpec("free", "UINT8", (-1, -1, -1, 1)))
OUTPUTS = (TensorSpec("output", "FP32", (-1, 2)),)


def described(folder: Any, text: str) -> ProgramDescription:
    (folder / "m.toml").write_text(text)
    return read_description(folder / "m.pt2", Signature(INPUTS, OUTPUTS))


def test_a_description_has_pictures_and_labels(tmp_path: Any) -> None:
    assert read_description(tmp_path / "m.pt2", Signature(INPUTS, OUTPUTS)) == ProgramDescription()
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    found = described(
        tmp_path,
        "[pictures.image]\nmean = [0.5, 0.5, 0.5]\nstd = [1, 1, 1]\n"
        "[pictures.free]\ncrop = [32, 48]\nresize = 50\ninterpolation = 'bicubic'\n[labels]\noutput = 'labels.txt'",
    )
    assert found.pictures["image"] == PictureSpec(
        "image", "FP32", (3, 224, 224), 3, (224, 224), 256, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)
    )
    assert found.pictures["free"].shape == (32, 48, 1) and not found.pictures["free"].channels_first
    assert found.labels == {"output": ("cat", "dog")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pictures.other]", "pictures.other is not known here: use free, image"),
        ("[pictures.image]\nsize = 3", "pictures.image.size is not known here"),
        ("[pictures.image]\ncrop = [32, 32]", r"crop is \[32, 32\], and the input has \[224, 224\]"),
        ("[pictures.free]", r"crop must be the rows and columns"),
        ("[pictures.image]\nresize = 100", "resize must be a whole number of at least 224"),
        ("[pictures.image]\nmean = [1]", "mean has 1 numbers, and the input has 3 channels"),
        ("[pictures.image]\nstd = [1, 0, 1]", "std must not be 0"),
        ("[pictures.free]\ncrop = [2, 2]\nmean = [1]", "is UINT8, so it has neither mean nor std"),
        ("[pictures.image]\ninterpolation = 'area'", "interpolation must be one of bilinear, nearest, bicubic"),
        ("[labels]\noutput = '../etc'", "is no file of the program's directory"),
        ("[labels]\n\noutput = 'm.toml'", r"m.toml has 3 labels, and the output 'output' has the shape \[-1, 2\]"),
        ("[[labels", "m.toml is not TOML"),
        ("pictures = 3", "pictures must be a table"),
    ],
)
def test_a_description_with_a_mistake_names_it(tmp_path: Any, text: str, said: str) -> None:
    with pytest.raises(CheckpointInvalid, match=said):
        described(tmp_path, text)
