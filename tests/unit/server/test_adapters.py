"""The adapters of a start: what the settings ask for, what lies beside the model, and what clients may name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from app.errors import CheckpointInvalid, InvalidRequest, SettingsInvalid
from app.server.adapters import AdapterReader, planned_adapters
from app.server.prepare import prepare
from app.settings import Settings, load_settings
from app.weights.lora.adapter import LoraAdapter, ServedAdapters
from app.weights.open import open_model
from tiny_adapters import write_adapter
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "base")


def planned(base: Path, **settings: Any) -> ServedAdapters | None:
    return planned_adapters(Settings(model=base, **settings), open_model(base))


def test_without_adapters_there_is_nothing_to_plan(base: Path) -> None:
    assert planned(base) is None


def test_places_and_rank_follow_the_listed_adapters(base: Path, tmp_path: Path) -> None:
    adapters = [f"a{rank}={write_adapter(tmp_path / str(rank), base, rank=rank)}" for rank in (3, 20)]
    found = planned(base, lora=tuple(adapters))
    assert found is not None
    assert (found.slots, found.max_rank, list(found.named)) == (2, 20, ["a3", "a20"])
    with_root = planned(base, lora=tuple(adapters[:1]), lora_root=tmp_path)
    assert with_root is not None
    assert (with_root.slots, with_root.max_rank) == (8, 16)
    given = planned(base, lora=tuple(adapters), max_loras=4, max_lora_rank=32)
    assert given is not None
    assert (given.slots, given.max_rank) == (4, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": ("base={a}",)}, "'base' is the name of the model itself"),
        ({"lora": ("a={a}", "b={a}"), "max_loras": 1}, "max_loras is 1, and lora lists 2"),
        (
            {"lora": ("a={a}",), "max_lora_rank": 2},
            "has rank 4, and at most 2 is served: max_lora_rank may be up to 64",
        ),
        ({"lora": ("a={a}/none",)}, "is no directory here"),
        ({"lora_root": "{a}/none"}, "is no directory here"),
        ({"max_loras": 2}, "max_loras needs adapters"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    placed = {
        name: tuple(each.format(a=adapter) for each in value) if isinstance(value, tuple)
        else Path(value.format(a=adapter)) if isinstance(value, str) else value
        for name, value in settings.items()
    }  # fmt: skip
    with pytest.raises((SettingsInvalid, CheckpointInvalid)) as refused:
        planned(base, **placed)
    assert message in refused.value.message


@pytest.mark.parametrize("given", [("a",), ("a=",), ("=b",), ("a=b", "a=c")])
def test_lora_is_a_list_of_names_and_directories(given: tuple[str, ...]) -> None:
    with pytest.raises(SettingsInvalid, match="lora"):
        load_settings(lora=given)


def test_an_adapter_beside_the_model_must_be_asked_for(base: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(base, tmp_path / "both"))
    write_adapter(both, base)
    with pytest.raises(CheckpointInvalid) as refused:
        prepare(Settings(model=both))
    assert f"--lora NAME={both}" in refused.value.message
    assert prepare(Settings(model=both, lora=(f"mine={both}",))).adapters is not None
    (both / "adapter_config.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"adapter_model\.safetensors"):
        prepare(Settings(model=both))


def test_the_memory_of_all_places_is_planned(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base)
    alone = prepare(Settings(model=base, precision="fp32"))
    prepared = prepare(Settings(model=base, precision="fp32", lora=(f"a={adapter}",), max_loras=3))
    assert prepared.adapters is not None
    assert prepared.needs.adapter_elements == prepared.adapters.num_elements
    more = prepared.plan.memory.weight_bytes - alone.plan.memory.weight_bytes
    assert more == 4 * prepared.adapters.num_elements


class FakeSlots:
    def __init__(self) -> None:
        self.ranks = list[tuple[int, int]]()

    def read_for(self, slot: int, adapter: LoraAdapter) -> None:
        self.ranks.append((slot, adapter.rank))


def test_clients_name_directories_below_the_root_only(base: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_adapter(root / "good", base, rank=3)
    write_adapter(tmp_path / "outside", base)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("")
    config = planned_config(base)
    slots = FakeSlots()
    read = AdapterReader(root, config, 16, cast(Any, slots))
    read("good", 1)
    read(str(root / "good"), 2)
    assert slots.ranks == [(1, 3), (2, 3)]
    for path in (
        "",
        ".",
        "..",
        "../outside",
        "link",
        "loop",
        "file",
        "none",
        "/etc",
        "a\0b",
        "x" * 5000,
        str(tmp_path),
    ):
        with pytest.raises(InvalidRequest, match="below the server's lora_root"):
            read(path, 0)
    (root / "good" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="not a whole safetensors file"):
        read("good", 0)


def planned_config(base: Path) -> Any:
    return cast(Any, open_model(base)).decoder
