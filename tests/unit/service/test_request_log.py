"""The line of a request has its figures, and nothing that could forge another line."""

from __future__ import annotations

import logging

import pytest

from app.service.requests import REQUEST_LOGGER, ClientRequest, log_request


def test_a_line_has_figures_and_no_forged_lines(caplog: pytest.LogCaptureFixture) -> None:
    figures = ClientRequest()
    figures.add(5, 8, 0.002, 0.025)
    figures.add(4, 3, 0.004, 0.020)
    with caplog.at_level(logging.INFO, REQUEST_LOGGER):
        log_request("POST", "/v1/completions", "abc", 200, 0.1296, figures)
        log_request("POST", "/x\n\x1b[31mINFO " + "y" * 200, "abc", 404, 0.0, ClientRequest())
    first, second = caplog.messages
    assert first == (
        "POST /v1/completions 200 id=abc prompt_tokens=9 completion_tokens=11 queue_ms=4.0 first_token_ms=25.0 total_ms=129.6"
    )
    assert second.startswith("POST /x%0A%1B%5B31mINFO%20y") and len(second) < 250
    assert second.endswith(" 404 id=abc prompt_tokens=0 completion_tokens=0 queue_ms=- first_token_ms=- total_ms=0.0")
    fields = caplog.records[0].__dict__["fields"]
    assert (fields["id"], fields["status"], fields["first_token_ms"]) == ("abc", 200, 25.0)


def test_a_program_has_rows_in_place_of_tokens(caplog: pytest.LogCaptureFixture) -> None:
    figures = ClientRequest(rows=8)
    figures.add(0, 0, 0.002, None)
    with caplog.at_level(logging.INFO, REQUEST_LOGGER):
        log_request("POST", "/v2/models/m/infer", "abc", 200, 0.01, figures)
    assert caplog.messages == ["POST /v2/models/m/infer 200 id=abc rows=8 queue_ms=2.0 first_token_ms=- total_ms=10.0"]


def test_requests_that_only_read_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REQUEST_LOGGER):
        log_request("GET", "/healthz", "abc", 200, 0.0, ClientRequest())
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, REQUEST_LOGGER):
        log_request("GET", "/healthz", "abc", 200, 0.0, ClientRequest())
    assert len(caplog.messages) == 1
