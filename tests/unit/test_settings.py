"""Settings: flags over environment, Kubernetes' variables ignored, one sentence a mistake, and rows for the help and the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.cli.parser import setting_rows
from app.errors import SettingsInvalid
from app.settings import Settings, load_settings, parse_bytes


def test_everything_is_auto_and_local_when_nothing_is_said() -> None:
    settings, warnings = load_settings()
    assert warnings == []
    assert (settings.model, settings.host, settings.port) == (None, ("127.0.0.1",), 8000)
    assert {settings.device, settings.precision, settings.threads, settings.kv_cache_bytes} == {"auto"}


def test_a_flag_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_PORT", "9000")
    monkeypatch.setenv("ARMATURE_THREADS", "3")
    settings, _ = load_settings(port="9001")
    assert (settings.port, settings.threads) == (9001, 3)


def test_an_empty_variable_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_MODEL", "")
    assert load_settings()[0].model is None


def test_settings_are_frozen() -> None:
    settings, _ = load_settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("ARMATURE_PORT", "tcp://10.0.0.1:8000"),
        ("ARMATURE_SERVICE_HOST", "10.0.0.1"),
        ("ARMATURE_SERVICE_PORT", "8000"),
        ("ARMATURE_SERVICE_PORT_HTTP", "8000"),
        ("ARMATURE_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("ARMATURE_PORT_8000_TCP_PROTO", "tcp"),
        ("ARMATURE_PORT_8000_TCP_PORT", "8000"),
        ("ARMATURE_PORT_8000_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_what_kubernetes_injects_is_ignored_with_a_warning(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    settings, warnings = load_settings()
    assert settings.port == 8000
    assert warnings == [f"{name} was injected by Kubernetes for a Service named armature and is ignored."]


def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_THREDS", "2")
    assert load_settings()[1] == ["ARMATURE_THREDS is not a setting and is ignored."]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"port": "65536"}, "port (--port, ARMATURE_PORT): input should be less than or equal to 65535, got '65536'"),
        ({"device": "tpu"}, "device (--device, ARMATURE_DEVICE)"),
        ({"threads": "0"}, "threads (--threads, ARMATURE_THREADS)"),
        ({"drain_seconds": "-1"}, "greater than or equal to 0"),
        ({"request_timeout_seconds": "nan"}, "request_timeout_seconds"),
        ({"kv_cache_bytes": "4 gigs"}, "got '4 gigs'"),
        ({"no_such": "1"}, "no_such is not a setting"),
    ],
)
def test_a_mistake_is_one_sentence_with_flag_and_variable(flags: dict[str, str], expected: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(**flags)
    assert expected in caught.value.message
    assert caught.value.exit_code == 2


def test_a_refused_key_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, variable in (
        ({"api_keys": 5551234}, "[]"),
        ({}, '["a", 5551234]'),
        ({}, "sk-5551234,"),
        ({}, '["sk-5551234"'),
    ):
        monkeypatch.setenv("ARMATURE_API_KEYS", variable)
        with pytest.raises(SettingsInvalid, match="api_keys") as caught:
            load_settings(**flags)
        assert "5551234" not in caught.value.message


def test_two_mistakes_are_reported_at_once() -> None:
    with pytest.raises(SettingsInvalid, match=r"device .*; port "):
        load_settings(port="x", device="tpu")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2kb", 2000),
        ("77", 77),
        ("77b", 77),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert load_settings(kv_cache_bytes=text)[0].kv_cache_bytes == expected


@given(st.text())
def test_any_text_is_a_size_or_is_left_alone(text: str) -> None:
    parsed = parse_bytes(text)
    assert parsed is text or isinstance(parsed, int)


def test_every_setting_has_a_row_that_people_can_read() -> None:
    rows = {row.name: row for row in setting_rows()}
    assert sorted(rows) == sorted(Settings.model_fields)
    assert all(row.description.endswith(".") for row in rows.values())
    threads = rows["threads"]
    assert (threads.flag, threads.variable, threads.values, threads.default) == (
        "--threads",
        "ARMATURE_THREADS",
        "auto|INTEGER",
        "auto",
    )
    assert rows["model"].values == "PATH"
    assert rows["api_keys"].values == "LIST"


def test_the_demo_is_served_where_no_model_is_named() -> None:
    assert load_settings()[0].checkpoint_directory.parts[-3:] == ("app", "demo", "llama")
    assert load_settings(model="./org/name")[0].checkpoint_directory == Path.cwd() / "org" / "name"
    assert load_settings(model="some/where")[0].checkpoint_directory == Path("some/where")
    assert load_settings(model="~/where")[0].checkpoint_directory == Path.home() / "where"


def test_a_model_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.cli.parser import parse_arguments
    from app.settings import given_settings

    arguments = parse_arguments(["serve", "--served-model-name", "a", "b"])
    assert given_settings(arguments)["served_model_name"] == "a,b"
    assert load_settings(served_model_name="a, b")[0].served_model_name == ("a", "b")
    monkeypatch.setenv("ARMATURE_SERVED_MODEL_NAME", "c,d")
    assert load_settings()[0].served_model_name == ("c", "d")
    with pytest.raises(SettingsInvalid, match=r"served_model_name.*must not be empty"):
        load_settings(served_model_name="a,,b")
