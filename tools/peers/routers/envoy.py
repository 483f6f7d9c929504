"""Configurations of Envoy for comparisons: its own policies, ORCA's weights, and an endpoint picker by ext-proc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TYPES = "type.googleapis.com/envoy.extensions"
POLICIES = f"{TYPES}.load_balancing_policies"
DESTINATION = "x-gateway-destination-endpoint"  # of the endpoint picker protocol
CONNECT = "0.5s"
RETRIES = {
    "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
    "retriable_status_codes": [429, 503],  # nothing was computed
    "num_retries": 2,
    "retry_host_predicate": [
        {
            "name": "previous_hosts",
            "typed_config": {"@type": f"{TYPES}.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
        }
    ],
    "host_selection_retry_max_attempts": "5",
}

# A server that ends refuses connections at once, and a policy without chance would choose it again and again.
HEALTH: dict[str, Any] = {
    "health_checks": [
        {
            "timeout": "1s",
            "interval": "1s",
            "no_traffic_interval": "1s",
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "http_health_check": {"path": "/readyz"},
        }
    ],
    "outlier_detection": {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 1,
        "enforcing_consecutive_5xx": 0,  # a full server's refusals
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
        "base_ejection_time": "5s",
        "max_ejection_percent": 50,
    },
}


def policy(name: str) -> dict[str, Any]:
    """Return a cluster's policy. `picker` follows the picker's header, and without it counts open requests."""
    own = {
        "round_robin": ("round_robin.v3.RoundRobin", {}),
        "least_request": ("least_request.v3.LeastRequest", {"choice_count": 2}),
        "least_request, all": ("least_request.v3.LeastRequest", {"selection_method": "FULL_SCAN"}),
        "client_side_weighted_round_robin": (
            "client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
            {"enable_oob_load_report": False, "blackout_period": "1s", "weight_update_period": "1s"},
        ),
    }
    if name == "picker":
        kind, settings = (
            "override_host.v3.OverrideHost",
            {
                "override_host_sources": [{"header": DESTINATION}],
                "fallback_policy": {"policies": [_extension(*own["least_request, all"])]},
            },
        )
    else:
        kind, settings = own[name]
    return {"policies": [_extension(kind, settings)]}


def _extension(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    name = f"envoy.load_balancing_policies.{kind.partition('.')[0]}"
    return {"typed_extension_config": {"name": name, "typed_config": {"@type": f"{POLICIES}.{kind}", **settings}}}


def configuration(
    port: int, servers: Sequence[str], name: str, weights: Sequence[int], picker_port: int | None = None
) -> dict[str, Any]:
    """Return Envoy's configuration, which it also reads as JSON, with one listener before `servers` (HOST:PORT)."""
    clusters = [_cluster("servers", servers, weights) | {"load_balancing_policy": policy(name)}]
    filters = []
    if picker_port is not None:
        clusters.append(_cluster("picker", [f"127.0.0.1:{picker_port}"], [1]) | _http2())
        filters.append(_picker_filter())
    filters.append({"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}})
    return {"static_resources": {"listeners": [_listener(port, filters)], "clusters": clusters}}


def _listener(port: int, filters: list[dict[str, Any]]) -> dict[str, Any]:
    route = {"cluster": "servers", "timeout": "0s", "retry_policy": RETRIES}
    host = {
        "name": "all",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
        # Servers report their load to whoever asks; Envoy's weights by load need it in every response.
        "request_headers_to_add": [{"header": {"key": "endpoint-load-metrics-format", "value": "TEXT"}}],
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [host]},
        "http_filters": filters,
        "stream_idle_timeout": "0s",
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": "in", "address": _address(f"127.0.0.1:{port}"), "filter_chains": [chain]}


def _picker_filter() -> dict[str, Any]:
    return {
        "name": "picker",
        "typed_config": {
            "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "BUFFERED",
                "response_header_mode": "SKIP",
                "response_body_mode": "NONE",
            },
            "message_timeout": "2s",
            "failure_mode_allow": True,
        },
    }


def _cluster(name: str, servers: Sequence[str], weights: Sequence[int]) -> dict[str, Any]:
    endpoints = [
        {"endpoint": {"address": _address(server)}, "load_balancing_weight": weight}
        for server, weight in zip(servers, weights, strict=True)
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": CONNECT,
        **(HEALTH if name == "servers" else {}),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _http2() -> dict[str, Any]:
    options = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "typed_extension_protocol_options": {
            f"{TYPES.partition('/')[2]}.upstreams.http.v3.HttpProtocolOptions": options
        }
    }


def _address(server: str) -> dict[str, Any]:
    host, _, port = server.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
