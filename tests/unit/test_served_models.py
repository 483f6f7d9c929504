"""Which models `--model` names, with which settings: a path, names with models, or a file with tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.parser import parse_arguments
from app.errors import SettingsInvalid
from app.settings import Settings, given_settings, load_settings, named_models, one_model, served_models


def models_of(*words: str) -> tuple[Settings, ...]:
    return served_models(load_settings(**given_settings(parse_arguments(("serve", *words))))[0])


def names_and_models(*words: str) -> list[tuple[tuple[str, ...], str]]:
    return [(each.served_model_name, str(each.model)) for each in models_of(*words)]


@pytest.mark.parametrize(
    "text",
    [
        "/data/lr=1",
        "./lr=1",
        "../lr=1",
        "~/lr=1",
        "org/name",
        "org/name@rev=1",
        "org/name:file=1.gguf",
        "=x",
        "a b=c",
        "-a=b",
    ],
)
def test_a_text_is_a_path_unless_it_begins_with_a_name_and_an_equals_sign(text: str) -> None:
    assert named_models(text) == ()


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    assert named_models("lr=1") == ()
    assert named_models("lr=2") == (("lr", "2"),)
    assert names_and_models("--model", "lr=1") == [((), "lr=1")]
    assert names_and_models("--model", "x=./lr=1") == [(("x",), str(tmp_path / "lr=1"))]


def test_one_model_stays_as_it_was_given() -> None:
    assert names_and_models("--model", "org/name") == [((), "org/name")]
    assert models_of() == (load_settings()[0],)


def test_the_flag_is_repeated_and_the_variable_has_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(("chat",), "Qwen/Qwen3-0.6B"), (("embed",), "/data/a,b"), (("rerank",), "bert")]
    words = [f"{name}={model}" for (name,), model in pairs]
    assert names_and_models(*(part for word in words for part in ("--model", word))) == pairs
    assert names_and_models(f"--model={words[0]}", *(f"--model={word}" for word in words[1:])) == pairs
    assert names_and_models(",".join(words)) == pairs
    monkeypatch.setenv("ARMATURE_MODEL", ",".join(words))
    assert names_and_models() == pairs


def test_models_without_names_are_not_several(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "--model", "org/a", "--model", "org/b"])
    assert "NAME=MODEL" in capsys.readouterr().err
    with pytest.raises(SettingsInvalid, match="two models are called a"):
        models_of("--model", "a=demo", "--model", "a=bert")


def write(folder: Path, text: str) -> str:
    file = folder / "models.toml"
    file.write_text(text)
    return str(file)


def test_a_table_has_the_settings_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_CALIBRATE", "off")
    file = write(
        tmp_path,
        '[chat]\nmodel = "org/a"\nserved_model_name = ["gpt"]\nthreads = 2\nkv_cache_bytes = "1GiB"\nlora = ["x=/x"]\n'
        '["v1.5"]\nmodel = "./local"\nload = "on-demand"\n[demo]\n',
    )
    chat, local, demo = models_of(file, "--threads", "4", "--port", "9000")
    assert (chat.served_model_name, str(chat.model), chat.threads, chat.kv_cache_bytes) == (
        ("chat", "gpt"),
        "org/a",
        2,
        2**30,
    )
    assert (chat.lora, chat.calibrate, chat.port) == (("x=/x",), "off", 9000)
    assert (local.served_model_name, local.model, local.threads, local.load) == (
        ("v1.5",),
        tmp_path / "local",
        4,
        "on-demand",
    )
    assert (demo.model, demo.load) == (None, "start")


def test_keys_of_a_model_take_the_place_of_the_keys_for_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    file = write(tmp_path, "[one]\napi_keys = ['a']\n[two]\napi_key_file = './two'\n[three]\n")
    found = models_of(file, "--api-keys", "b", "--api-key-file", str(keys))
    assert [(each.api_keys, each.api_key_file) for each in found] == [
        (("a",), None), ((), tmp_path / "two"), (("b",), keys),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, said",
    [
        ("[chat]\nport = 1\n", "port in .chat. is one value for all models: give it as --port"),
        ("[chat]\ndrain_seconds = 1\n", "--drain-seconds"),
        ("[chat]\nmodel_control = 'on'\n", "--model-control"),
        ("[chat]\nprecison = 'int8'\n", r"\[chat\] precison is not a setting"),
        ("[chat]\nthreads = 0\n", r"\[chat\] threads \(--threads"),
        ("model = 'x'\n", "outside of a table"),
        ("['a/b']\n", "a model's name has letters"),
        ("", "has no table"),
        ("[chat", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=said):
        models_of(write(tmp_path, text))


def test_an_absent_file_and_foreign_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"models\.toml cannot be read"):
        models_of(str(tmp_path / "models.toml"))
    with pytest.raises(SettingsInvalid, match="served_model_name is of one model"):
        models_of("--model", "a=demo", "--model", "b=bert", "--served-model-name", "c")


def test_a_command_for_one_model_refuses_several() -> None:
    several = load_settings(model="a=demo,b=bert")[0]
    with pytest.raises(SettingsInvalid, match=r"2 models \(a, b\)"):
        one_model(several)
    assert one_model(load_settings(model="a=bert")[0]).served_model_name == ("a",)


def test_the_file_of_the_overlay_is_one() -> None:
    found = models_of(str(Path(__file__).parents[2] / "k8s/overlays/several/models.toml"))
    assert [each.served_model_name for each in found] == [("chat",), ("embed",), ("archive",)]
