"""OpenTelemetry traces of requests: what a span says, and how spans are made and sent (the extra `otel`)."""
