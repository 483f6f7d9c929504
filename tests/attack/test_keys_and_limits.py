"""Who may use the API: keys in every documented form, rates of each key or address, hosts, origins, TLS, and /info."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.access import NO_RULES, AccessControl, AccessRules, ApiKeys
from app.cli.parser import parse_arguments
from app.errors import InvalidRequest, Overloaded, RateLimited, SettingsInvalid, Unauthorized
from app.server.listeners import url_of
from app.server.process import tls_context
from app.server.startup import is_local_only, read_api_keys
from app.service import rate_limit
from app.service.rate_limit import RateLimiter
from app.service.requests import CLIENT_REQUEST, ClientRequest
from app.settings import Settings, given_settings, load_settings, parse_rate_limit
from fake_worker import request as generation
from fake_worker import serving
from tests.attack.attack_server import Answer, attacked, get, post, read_all

CLOSE = b"connection: close"
BODY = b'{"prompt":"Once"}'


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def flags(*arguments: str) -> Settings:
    return load_settings(**given_settings(parse_arguments(["serve", *arguments])))[0]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('["sekret-1"]', ("sekret-1",)),
        ('["a,b", "c"]', ("a,b", "c")),
        ("sekret-1", ("sekret-1",)),
        ("one,two", ("one", "two")),
        (" one , two ", ("one", "two")),
    ],
)
def test_keys_in_every_form(text: str, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert flags("--api-keys", text).api_keys == keys
    monkeypatch.setenv("ARMATURE_API_KEYS", text)
    assert flags().api_keys == keys
    file = tmp_path / "keys"
    file.write_text("third\n")
    assert read_api_keys(flags("--api-key-file", str(file))) == (*keys, "third")


@pytest.mark.parametrize(
    "text", ["", ",", "sekret,", '["sekret"', '["sekret", ""]', '["sekret", 5]', '[["sekret"]]', "[sekret]"]
)
def test_a_list_of_keys_that_is_none_fails_closed_and_untold(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="api_keys") as caught:
        flags("--api-keys", text)
    assert "sekret" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rate_limit", "600"),
        ("rate_limit", "requests=0"),
        ("rate_limit", "requests=5,requests=6"),
        ("rate_limit", "tokens=-1"),
        ("cors_allow_origins", "app.example.com"),
        ("cors_allow_origins", "https://app.example.com/path"),
        ("max_connections", "0"),
        ("write_timeout_seconds", "0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(name: str, text: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{name} "):
        load_settings(**{name: text})


def test_rates_are_read() -> None:
    assert parse_rate_limit("") == (None, None)
    assert parse_rate_limit("requests=600") == (600, None)
    assert parse_rate_limit(" tokens = 5 , requests=600") == (600, 5)


# ---- rates -----------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute_and_when_the_next_one_may_come() -> None:
    clock = Clock()
    limiter = RateLimiter(6, None, clock)
    for _ in range(6):
        at_once(limiter.admit("a"))
    with pytest.raises(RateLimited) as caught:
        at_once(limiter.admit("a"))
    assert caught.value.retry_after_seconds == pytest.approx(10.0)
    at_once(limiter.admit("b"))
    clock.now = 10.0
    at_once(limiter.admit("a"))
    with pytest.raises(RateLimited):
        at_once(limiter.admit("a"))
    clock.now = 1e6
    for _ in range(6):
        at_once(limiter.admit("a"))
    with pytest.raises(RateLimited):
        at_once(limiter.admit("a"))


def test_tokens_are_reserved_while_requests_run_and_taken_when_they_end() -> None:
    clock = Clock()
    account = at_once(RateLimiter(None, 400, clock).admit("a"))
    for _ in range(4):
        at_once(account.reserve(100))
    with pytest.raises(RateLimited) as caught:
        at_once(account.reserve(1))
    assert 0 < caught.value.retry_after_seconds <= 60
    account.settle(100, 10)
    at_once(account.reserve(90))
    with pytest.raises(RateLimited):
        at_once(account.reserve(1))


def test_a_request_of_more_than_a_minute_is_served_alone_and_paid_for() -> None:
    clock = Clock()
    account = at_once(RateLimiter(None, 400, clock).admit("a"))
    at_once(account.reserve(1_000))
    with pytest.raises(RateLimited):
        at_once(account.reserve(1))
    account.settle(1_000, 800)
    clock.now = 59.0
    with pytest.raises(RateLimited):
        at_once(account.reserve(1))
    clock.now = 61.0
    at_once(account.reserve(1))


def test_tokens_are_taken_when_they_are_known() -> None:
    clock = Clock()
    limiter = RateLimiter(None, 600, clock)
    at_once(limiter.admit("a")).settle(0, 900)
    with pytest.raises(RateLimited) as caught:
        at_once(limiter.admit("a"))
    assert caught.value.retry_after_seconds == pytest.approx(30.1)
    clock.now = 30.2
    at_once(limiter.admit("a"))


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 40)), max_size=200))
def test_the_table_is_bounded_and_no_one_gets_more_than_their_share(steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    admitted: dict[int, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate_limit, "MAX_CLIENTS", 4)
        limiter = RateLimiter(5, None, clock)
        for client, seconds in steps:
            clock.now += seconds
            try:
                at_once(limiter.admit(client))
            except RateLimited:
                continue
            admitted.setdefault(client, []).append(clock.now)
            assert len(limiter) <= 4
    for times in admitted.values():
        for start in times:
            within = sum(start <= at < start + 60 for at in times)
            assert within <= 5 + 5 + 5  # a full bucket, its refill, and once more if the client was one of the others


async def test_a_request_is_charged_for_what_it_used() -> None:
    limiter = RateLimiter(None, 1_000_000, Clock())
    account = at_once(limiter.admit("a"))
    CLIENT_REQUEST.set(ClientRequest(account))
    before = account._tokens.left(0.0)  # type: ignore[union-attr]
    async with serving() as (service, worker, _):
        stream = service.generate(generation())
        await anext(stream)
        (command,) = await worker.orders()
        with pytest.raises(RateLimited):
            at_once(account.reserve(1_000_000))  # the prompt and the rest of the context are reserved
        await stream.aclose()
        assert before - account._tokens.left(0.0) == len(command.token_ids) > 0  # type: ignore[union-attr]


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_429_in_the_form_of_each_dialect() -> None:
    rules = AccessRules(requests_per_minute=2)
    with attacked(runtime={"access_rules": rules}) as server:
        ok = post("/generate", BODY, CLOSE)
        assert [server.ask(ok).status for _ in range(3)] == [200, 200, 429]
        refused = {
            path: server.ask(post(path, BODY, CLOSE))
            for path in ("/generate", "/v1/completions", "/predict", "/v2/models/demo/generate")
        }
        assert {answer.status for answer in refused.values()} == {429}
        assert all(1 <= int(answer.headers["retry-after"]) <= 30 for answer in refused.values())
        assert refused["/generate"].json["error"]["code"] == "rate_limit_exceeded"
        assert refused["/v1/completions"].json["error"]["type"] == "rate_limit_error"
        assert refused["/predict"].json["error_type"] == "Overloaded"
        assert "requests per minute" in refused["/v2/models/demo/generate"].json["error"]
        assert server.ask(get("/healthz", CLOSE)).status == 200


def test_each_key_has_its_own_share_and_wrong_ones_share_the_address() -> None:
    runtime = {"access_rules": AccessRules(requests_per_minute=1), "api_keys": ("one", "two")}
    with attacked(runtime=runtime) as server:
        asked = lambda key: server.ask(post("/generate", BODY, CLOSE, b"authorization: Bearer " + key)).status  # noqa: E731
        assert [asked(key) for key in (b"one", b"two", b"one", b"bad", b"worse", b"two")] == [
            200,
            200,
            429,
            401,
            429,
            429,
        ]


def test_hosts() -> None:
    rules = AccessRules(allowed_hosts=("api.example.com", "*.Example.org", "localhost", "[::1]"))
    with attacked(runtime={"access_rules": rules}) as server:
        status = lambda path, host: server.ask(get(path, CLOSE).replace(b"host: x", b"host: " + host)).status  # noqa: E731
        for host in (b"api.example.com", b"API.example.com:8000", b"a.example.org", b"localhost:1", b"[::1]:8000"):
            assert status("/v1/models", host) == 200, host
        for host in (b"evil.example", b"example.org", b"evilexample.org", b"localhost.evil.example", b"127.0.0.1"):
            assert status("/v1/models", host) == 400, host
            assert status("/healthz", host) == 200


@pytest.mark.parametrize(
    "allowed", [("::1",), ("[::1]",), ("[0:0:0:0:0:0:0:1]",), ("[::1]:8000",), ("LOCALHOST:80", "::1"), ("*",)]
)
def test_hosts_are_compared_in_one_spelling(allowed: tuple[str, ...]) -> None:
    access = AccessControl(AccessRules(allowed_hosts=allowed), (), ())
    for host in ("[::1]", "[::1]:8000", "[0::1]:1"):
        at_once(access.check(scope(host=host)))


MALFORMED = (
    "localhost:80@evil", "127.0.0.1:x", "localhost@evil", "localhost/", "evil/localhost", "[::1", "::1", "[::1]x", "localhost:80:80",
    "localhost, evil", "localhost evil", "http://localhost", "localhost#", "[localhost]", "localhost..",
)  # fmt: skip


@pytest.mark.parametrize("host", MALFORMED)
@pytest.mark.parametrize(
    "rules", [AccessRules(only_loopback=True), AccessRules(allowed_hosts=("localhost", "127.0.0.1", "[::1]"))]
)
def test_a_host_that_is_none_is_not_allowed(rules: AccessRules, host: str) -> None:
    with pytest.raises(InvalidRequest):
        at_once(AccessControl(rules, (), ()).check(scope(host=host)))


LOOPBACK = AccessRules(only_loopback=True)


def test_without_keys_on_loopback_only_its_names_are_answered() -> None:
    """A web page whose name was rebound to 127.0.0.1 sends its own name."""
    with attacked(runtime={"access_rules": LOOPBACK}) as server:
        status = lambda path, host: server.ask(get(path, CLOSE).replace(b"host: x", b"host: " + host)).status  # noqa: E731
        for path in ("/v1/models", "/info", "/metrics", "/docs", "/", "/healthz", "/nothing"):
            assert status(path, b"attacker.example:8000") == 400, path
        for host in (
            b"localhost",
            b"LOCALHOST.:1",
            b"a.localhost",
            b"127.0.0.1",
            b"127.9.9.9:1",
            b"[::1]:8",
            b"[::ffff:127.0.0.1]",
        ):
            assert status("/v1/models", host) == 200, host
        for host in (
            b"attacker.example",
            b"localhost.attacker.example",
            b"notlocalhost",
            b"10.0.0.1",
            b"0.0.0.0",
            b"[::2]",
            b"",
        ):
            assert status("/v1/models", host) == 400, host
        refused = server.ask(post("/v1/completions", BODY, CLOSE).replace(b"host: x", b"host: evil"))
        assert (
            refused.json["error"]["type"] == "invalid_request_error"
            and "--allowed-hosts" in refused.json["error"]["message"]
        )
        assert not server.service.requests
        line = b"GET http://attacker.example:80/v1/models HTTP/1.1\r\nhost: localhost\r\n" + CLOSE + b"\r\n\r\n"
        assert server.ask(line).status == 400
        assert (
            server.ask(line.replace(b"attacker.example:80", b"localhost").replace(b": localhost", b": evil")).status
            == 200
        )
        assert server.ask(line.replace(b"attacker.example", b"localhost@evil")).status == 400
        assert server.ask(b"GET /v1/models HTTP/1.0\r\n\r\n").status == 200
        assert server.ask(b"GET http://evil/v1/models HTTP/1.0\r\n\r\n").status == 400


@pytest.mark.parametrize(
    ("given", "is_local"),
    [
        ({}, True),
        ({"host": "localhost,::1"}, True),
        ({"host": "unix:/run/x.sock"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": ""}, False),
        ({"host": "127.0.0.1,192.0.2.1"}, False),
    ],
)
def test_which_servers_are_local(given: dict[str, str], is_local: bool) -> None:
    assert is_local_only(Settings(**given)) is is_local


def test_keys_follow_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("old\nother\n")
    keys = ApiKeys(lambda: read_api_keys(Settings(api_key_file=file)), file)
    with attacked(runtime={"api_keys": keys}) as server:
        asked = lambda key: server.ask(post("/generate", BODY, CLOSE, b"authorization: Bearer " + key)).status  # noqa: E731
        assert [asked(b"old"), asked(b"new")] == [200, 401]
        file.write_text("new\nother\n")
        assert [asked(b"old"), asked(b"new"), asked(b"other")] == [401, 200, 200]
        for broken in ("", "# none\n"):
            file.write_text(broken)
            assert [asked(b"new"), asked(b"old"), asked(b"")] == [200, 401, 401]
        file.unlink()
        assert [asked(b"new"), asked(b"old")] == [200, 401]
        swapped = tmp_path / "next"  # as Kubernetes exchanges a Secret's file
        swapped.write_text("last\n")
        swapped.rename(file)
        assert [asked(b"last"), asked(b"new"), asked(b"other")] == [200, 401, 401]
    assert caplog.text.count("the API keys stay as they were") == 2  # once for each reason
    assert "last" not in caplog.text


def test_origins() -> None:
    rules = AccessRules(cors_allow_origins=("https://app.example.com",))
    origin = b"origin: https://app.example.com"
    with attacked(runtime={"access_rules": rules, "api_keys": ("one",)}) as server:
        asked = (b"access-control-request-method: POST", b"access-control-request-headers: authorization,content-type")
        allowed = server.ask(get("/v1/chat/completions", CLOSE, origin, *asked, method="OPTIONS"))
        assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example.com"
        other = server.ask(
            get("/v1/chat/completions", CLOSE, b"origin: https://evil.example", *asked, method="OPTIONS")
        )
        assert "access-control-allow-origin" not in other.headers
        refused = server.ask(post("/generate", BODY, CLOSE, origin))
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://app.example.com"
    with attacked() as server:
        assert not any("access-control" in name for name in server.ask(post("/generate", BODY, CLOSE, origin)).headers)


def test_info_without_a_key_tells_what_a_client_needs() -> None:
    machine = {"facts": {"cpu": "secret"}, "model": {"name": "demo", "weights": "secret"}}
    with attacked(runtime={"api_keys": ("one",), "info": lambda: machine}) as server:
        public = server.ask(get("/info", CLOSE))
        model = {"name": "demo", "kind": "decoder", "max_model_len": 512}
        assert public.json == {"stage": "ready", "model": model}
        server.service.ready = False
        assert server.ask(get("/info", CLOSE)).json == {"stage": "ready"}
        assert server.ask(get("/info", CLOSE, b"authorization: Bearer two")).status == 401
        full = server.ask(get("/info", CLOSE, b"authorization: Bearer one"))
        assert full.json["facts"] == {"cpu": "secret"} and "version" in full.json


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    given = Settings(tls_cert=cert, tls_key=key)
    tls_context(given)
    trust = ssl.create_default_context(cafile=str(cert))
    with attacked(tls_cert=cert, tls_key=key) as server:
        with server.connect() as plain, trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(post("/generate", BODY, CLOSE))
            assert Answer.of(read_all(connection)).json["text"] == "Hello there"
        with server.connect() as plain:
            plain.sendall(get("/healthz"))
            assert b"200" not in read_all(plain)


def test_a_certificate_that_cannot_be_used_ends_the_start(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no key")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": cert}, "must be given together"),
        ({"tls_key": key}, "must be given together"),
        ({"tls_cert": cert, "tls_key": tmp_path / "absent"}, "cannot be used"),
        ({"tls_cert": cert, "tls_key": wrong}, "cannot be used"),
    ]
    for settings, sentence in cases:
        with pytest.raises(SettingsInvalid, match=sentence):
            tls_context(Settings(**settings))
    tls_context(Settings())


def test_the_url_says_https() -> None:
    class Listener:
        family = socket.AF_INET6

        def getsockname(self) -> tuple[str, int]:
            return "::1", 8000

    assert url_of(Listener(), has_tls=True) == "https://[::1]:8000"  # type: ignore[arg-type]


# ---- the check alone -------------------------------------------------------------------------------------------------


def scope(path: str = "/generate", client: tuple[str, int] | None = ("10.0.0.1", 5), **headers: str) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in {"host": "x", **headers}.items()]
    return {"method": "GET", "path": path, "headers": pairs, "http_version": "1.1", "client": client, "state": {}}


def test_addresses_of_one_network_are_one_client() -> None:
    access = AccessControl(AccessRules(requests_per_minute=1), (), ())
    for first, second in (("10.0.0.1", "::ffff:10.0.0.1"), ("2001:db8::1", "2001:db8::ffff:1")):
        at_once(access.check(scope(client=(first, 1))))
        with pytest.raises(RateLimited) as caught:
            at_once(access.check(scope(client=(second, 2))))
        assert isinstance(caught.value, Overloaded)
    at_once(access.check(scope(client=("2001:db8:1::1", 1))))
    at_once(access.check(scope(client=("::ffff:10.0.0.2", 1))))  # not the network of all IPv4 clients
    at_once(access.check(scope(client=None)))


def test_keys_and_hosts_are_checked() -> None:
    access = AccessControl(NO_RULES, ("one",), [("GET", "/healthz")])
    assert at_once(access.check(scope("/healthz"))) is None
    with pytest.raises(Unauthorized):
        at_once(access.check({**scope("/healthz"), "method": "POST"}))
    with pytest.raises(Unauthorized):
        at_once(access.check(scope()))
    with pytest.raises(InvalidRequest):
        at_once(access.check({**scope(), "headers": []}))
    given = scope("/info")
    assert at_once(access.check(given)) is None and given["state"] == {"has_key": False}
    given = scope("/info", authorization="bearer one")
    assert at_once(access.check(given)) is None and given["state"] == {"has_key": True}
