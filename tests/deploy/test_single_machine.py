"""Files for one machine without Kubernetes: systemd accepts the unit, and the parts of the Compose file fit together."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings, variable_of
from external_tools import ROOT, run, tool

UNIT = ROOT / "docs" / "systemd" / "armature.service"
COMPOSE = ROOT / "docs" / "compose.yaml"
EXPOSURE = 2.0  # of 10, by `systemd-analyze security`; a unit without hardening has 9.6
DRAINED_AFTER = Settings.model_fields["drain_seconds"].default + 5
# Of the Compose specification, those that the file uses.
TOP = {"name", "services", "configs", "volumes"}
OF_A_SERVICE = {
    "image", "environment", "ports", "volumes", "read_only", "tmpfs", "cap_drop", "security_opt", "stop_grace_period", "restart",
    "command", "configs", "depends_on",
}  # fmt: skip


def unit() -> dict[str, list[str]]:
    """Return the unit's keys with their values, in order."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that exists, since systemd looks for it."""
    file = tmp_path / "armature.service"
    text = UNIT.read_text(encoding="utf-8")
    file.write_text(text.replace("/opt/armature/bin/armature serve", "/bin/true"), encoding="utf-8")
    return file


def test_systemd_accepts_the_unit(installed: Path) -> None:
    told = run([tool("systemd-analyze"), "verify", installed])
    assert (told.returncode, told.stdout + told.stderr) == (0, "")
    installed.write_text(installed.read_text().replace("NoNewPrivileges", "NoMorePrivileges"), encoding="utf-8")
    told = run([tool("systemd-analyze"), "verify", installed])
    assert "NoMorePrivileges" in told.stderr, "the check finds a key that does not exist"


def test_the_unit_is_hardened(installed: Path) -> None:
    told = run([tool("systemd-analyze"), "security", "--offline=true", "--no-pager", installed])
    found = re.search(r"exposure level for armature\.service: ([\d.]+)", told.stdout)
    if found is None:
        pytest.skip("this systemd-analyze knows no --offline")
    assert float(found[1]) <= EXPOSURE
    assert "MemoryDenyWriteExecute" not in unit(), "oneDNN writes code"
    assert "ProcSubset" not in unit(), "the probe reads /proc/cpuinfo"


def test_the_unit_fits_the_server() -> None:
    given = unit()
    assert given["ExecStart"] == ["/opt/armature/bin/armature serve"]
    variables = re.findall(r"\b(ARMATURE_\w+)=", " ".join(given["Environment"]))
    assert set(variables) <= {variable_of(name) for name in Settings.model_fields}
    assert given["RestartPreventExitStatus"] == ["2"]
    assert int(given["TimeoutStopSec"][0]) >= DRAINED_AFTER
    assert {"CacheDirectory", "StateDirectory"} <= given.keys()
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "docs/systemd/armature.service" in page


@pytest.mark.parametrize("name", ["0-3", "12"])
def test_systemd_accepts_servers_on_cores_of_their_own(installed: Path, name: str) -> None:
    template = installed.with_name("armature@.service")
    installed.rename(template)
    own = template.with_name("armature@.service.d")
    own.mkdir()
    text = (UNIT.parent / "cores.conf").read_text(encoding="utf-8")
    (own / "cores.conf").write_text(text, encoding="utf-8")
    instance = template.with_name(f"armature@{name}.service")
    instance.symlink_to(template)
    told = run([tool("systemd-analyze"), "verify", instance])
    assert (told.returncode, told.stdout + told.stderr) == (0, "")
    (own / "cores.conf").write_text(text.replace("%i", "%i-x", 1), encoding="utf-8")
    assert "affinity" in run([tool("systemd-analyze"), "verify", instance]).stderr, "the instance's name is its CPUs"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return found


def test_the_compose_file_has_known_keys() -> None:
    assert compose().keys() <= TOP
    for service in compose()["services"].values():
        assert service.keys() <= OF_A_SERVICE


@pytest.mark.parametrize("name", ["armature", "prometheus", "grafana"])
def test_each_container_is_closed(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert not service["image"].endswith(":latest")
    assert ":" in service["image"]


def test_what_the_compose_file_names_exists() -> None:
    found = compose()
    assert found.keys() == TOP
    for service in found["services"].values():
        for each in service.get("configs", ()):
            assert (COMPOSE.parent / found["configs"][each["source"]]["file"]).is_file()
        for each in service["volumes"]:
            source = each["source"] if isinstance(each, dict) else each.partition(":")[0]
            source = re.sub(r"\$\{\w+:-(.*)\}", r"\1", source)
            assert source in found["volumes"] or (COMPOSE.parent / source).is_dir(), source
        assert set(service.get("depends_on", ())) <= found["services"].keys()
    environment = found["services"]["armature"]["environment"]
    assert set(environment) <= {variable_of(name) for name in Settings.model_fields}
    assert int(found["services"]["armature"]["stop_grace_period"].removesuffix("s")) >= DRAINED_AFTER


def test_whoever_runs_the_image_as_documented_waits_for_open_answers() -> None:
    """`docker stop` kills after 10 s where it is told nothing."""
    pages = [ROOT / "README.md", ROOT / "k8s" / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages)
    commands = [
        line
        for line in re.findall(r"^ *docker run .*$", text, re.MULTILINE)
        if "armature" in line and "--entrypoint" not in line
    ]
    assert len(commands) >= 2
    for command in commands:
        given = re.search(r"--stop-timeout (\d+)", command)
        assert given is not None and int(given[1]) >= DRAINED_AFTER, command


def test_the_image_has_the_folder_of_the_cache() -> None:
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    mounted = [each for each in compose()["services"]["armature"]["volumes"] if isinstance(each, str)]
    assert mounted == ["cache:/var/cache/armature"]
    assert "ARMATURE_CACHE_DIR=/var/cache/armature" in image


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    services = compose()["services"]
    monitoring = ROOT / "docs" / "monitoring"
    (source,) = yaml.safe_load((monitoring / "grafana-datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert any(port.endswith(":9090") for port in services["prometheus"]["ports"])
    (provider,) = yaml.safe_load((monitoring / "grafana-dashboards.yaml").read_text())["providers"]
    (folder,) = (each for each in services["grafana"]["volumes"] if each.endswith(":ro"))
    host, _, inside = folder.removesuffix(":ro").partition(":")
    assert inside == provider["options"]["path"]
    dashboards = [json.loads(file.read_text()) for file in (COMPOSE.parent / host).glob("*.json")]
    assert len(dashboards) == 4
    for dashboard in dashboards:
        kinds = {each["type"]: each.get("query") for each in dashboard["templating"]["list"]}
        assert kinds["datasource"] == source["type"], "the dashboards choose a data source of this type"


def test_prometheus_takes_its_file_and_scrapes_as_the_other_example() -> None:
    file = ROOT / "docs" / "monitoring" / "compose-prometheus.yml"
    mine, other = (yaml.safe_load(each.read_text()) for each in (file, file.with_name("prometheus.yml")))
    assert mine["global"] == other["global"]
    (job,), (example,) = mine["scrape_configs"], other["scrape_configs"]
    assert (job["job_name"], job["scrape_timeout"]) == (example["job_name"], example["scrape_timeout"])
    assert job["static_configs"] == [{"targets": ["armature:8000"]}]
    told = run([tool("promtool"), "check", "config", "--lint=all", "--lint-fatal", file])
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_wheel_has_what_the_unit_starts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "armature" in project["project"]["scripts"]
