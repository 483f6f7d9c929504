"""The web page's files over ASGI: what a browser may do with them, what is compressed and kept, keys, and the page turned off."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.application import create_app
from app.api.routing import ApiRuntime
from app.api.server.pages import POLICY, WEB_DIRECTORY, read_web_file, web_paths
from app.cli.parser import parse_arguments
from app.errors import UnknownArgument
from app.settings import given_settings, load_settings
from tests.api.scripted_service import CountingMetrics, Lifetime, ScriptedService

PATHS = ("/", *web_paths())
MOST_BYTES = 60_000  # of our own files together, compressed
MOST_VENDORED_BYTES = 110_000  # of the libraries, which are loaded with the first formula and the first code
SCRIPTS = sorted(WEB_DIRECTORY.glob("*.js"))


def without_page() -> Any:
    service: Any = ScriptedService()
    metrics: Any = CountingMetrics()
    return create_app(ApiRuntime(service, metrics, Lifetime(), dict, created=1, page=False))


async def get(app: Any, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
        return await client.request(options.pop("method", "GET"), path, **options)


@pytest.fixture
async def keyed(build: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    app = build(api_keys=("secret",))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
async def test_each_file_is_sent_with_its_type_and_the_policy(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] in {
        "text/html",
        "text/css",
        "text/javascript",
        "image/svg+xml",
    }
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["vary"] == "accept-encoding"


def test_the_policy_lets_nothing_run_that_is_not_a_file_of_the_page() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' data:"
    assert "unsafe" not in POLICY


async def test_a_browser_that_takes_gzip_gets_it(client: httpx.AsyncClient) -> None:
    path = "/web/page.css"
    plain = await client.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        packed = await client.get(path, headers={"accept-encoding": accepted})
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) < len(plain.content) / 2
    for refused in ("gzip;q=0", "br", "gzip;q=0.0"):
        assert "content-encoding" not in (await client.get(path, headers={"accept-encoding": refused})).headers


@pytest.mark.parametrize("path", ["/", "/web/main.js"])
async def test_what_a_browser_has_is_not_sent_again(client: httpx.AsyncClient, path: str) -> None:
    first = await client.get(path)
    again = await client.get(path, headers={"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert (await client.get(path, headers={"if-none-match": '"other"'})).status_code == 200


async def test_a_head_and_other_methods(client: httpx.AsyncClient) -> None:
    head = await client.head("/web/main.js")
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0
    assert (await client.head("/")).status_code == 200
    assert (await client.post("/web/main.js")).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/web/../settings.py", "/web/%2e%2e/settings.py", "/web/..%2fsettings.py", "/web//etc/passwd", "/web/", "/web"],
)
async def test_no_other_path_leads_to_a_file(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_the_page_needs_no_key_and_the_rest_does(keyed: httpx.AsyncClient) -> None:
    for path in PATHS:
        assert (await keyed.get(path)).status_code == 200
        assert (await keyed.head(path)).status_code == 200
    assert (await keyed.get("/info/steps")).status_code == 401
    # A route of encoders has the path of the page.
    assert (await keyed.post("/", json={"inputs": "x"})).status_code == 401
    assert (await keyed.get("/web/other.js")).status_code == 401


async def test_without_the_page_the_root_leads_to_the_documentation() -> None:
    app = without_page()
    response = await get(app, "/")
    assert response.status_code == 307
    assert (await get(app, f"/{response.headers['location']}")).status_code == 200
    assert (await get(app, "/web/main.js")).status_code == 404


def test_the_flag_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(*flags: str) -> str:
        return load_settings(**given_settings(parse_arguments(["serve", *flags])))[0].page

    assert page() == page("--page", "on") == "on"
    assert page("--no-page") == page("--page", "off") == "off"
    monkeypatch.setenv("ARMATURE_PAGE", "off")
    assert page() == "off"
    with pytest.raises(UnknownArgument, match="--no-page"):
        page("--no-pag")
    with pytest.raises(UnknownArgument):
        page("--no-offline")


# ---- the files themselves --------------------------------------------------------------------------------------------


def test_all_files_together_are_small() -> None:
    packed = {path: len(read_web_file(name).compressed) for path, name in web_paths().items()}
    vendored = sum(size for path, size in packed.items() if path.startswith("/web/vendor/"))
    assert vendored < MOST_VENDORED_BYTES
    assert sum(packed.values()) - vendored < MOST_BYTES
    assert len(read_web_file("index.html").compressed) < 2_000


def test_libraries_are_sent_with_their_licences_beside_them() -> None:
    folders = [path for path in (WEB_DIRECTORY / "vendor").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        assert "Permission" in (folder / "LICENSE").read_text() or "Redistribution" in (folder / "LICENSE").read_text()
        assert any(path.startswith(f"/web/vendor/{folder.name}/") for path in web_paths())
    assert not any(path.endswith("LICENSE") for path in web_paths()), "only what a page loads"


def test_no_library_is_loaded_before_it_is_needed() -> None:
    """The first text is there without them, so a library is imported in a function, never at the head of a file."""
    for script in SCRIPTS:
        assert not re.search(r"^import .*vendor/", script.read_text(), re.MULTILINE), script.name
    assert "vendor" not in (WEB_DIRECTORY / "index.html").read_text()


def test_nothing_is_loaded_from_elsewhere_or_inline() -> None:
    html = (WEB_DIRECTORY / "index.html").read_text()
    links = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert {f"/{link}" for link in links} <= {*web_paths(), "/docs"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", html)
    assert "url(" not in (WEB_DIRECTORY / "page.css").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_builds_no_markup_from_text_and_imports_what_exists(script: Path) -> None:
    text = script.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    imports = re.findall(r'(?:from|import\()\s*"([^"]+)"', text)
    assert all((script.parent / name).is_file() for name in imports)
    assert all(name.startswith("./") for name in imports)
    addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # the name of SVG's elements
    assert addresses == set()


def test_the_page_names_metrics_that_exist(metrics_text: str) -> None:
    """A metric that is renamed would be a dash in the page."""
    script = (WEB_DIRECTORY / "now.js").read_text()
    named = set(re.findall(r'(?:metrics\.value|perToken = metrics\.value)\(\s*"(\w+)"', script))
    # Without a price, a meter or a request these are absent; the process's own need no prefix.
    absent = {"power_watts", "cost_dollars_total", "predicted_wait_seconds", "process_resident_memory_bytes"}
    assert len(named) > 6
    for name in named - absent:
        assert f"armature_{name}" in metrics_text, name


@pytest.fixture
def metrics_text() -> str:
    from app.metrics.instruments import Metrics

    body, _ = Metrics().render("")
    contract = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text()
    listed = re.findall(r"`(\w+)`", contract.split("## 3. Metrics")[1])
    return body.decode() + " ".join(f"armature_{name}" for name in listed)


def test_the_examples_of_the_settings_are_json() -> None:
    """The schema and the tools that a button inserts; the page writes them as JSON."""
    script = (WEB_DIRECTORY / "settings.js").read_text()
    source = script.split("const EXAMPLE_SCHEMA = ")[1].split(";")[0]
    quoted = re.sub(r"(\w+): ", r'"\1": ', re.sub(r",(\s*})", r"\1", source))
    assert json.loads(quoted)["type"] == "object"
