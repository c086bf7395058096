"""What the gateway counts, as Prometheus reads it."""

from etude.gateway.service import Gateway


def prometheus_text(gateway: Gateway) -> bytes:
    """Return the text exposition of what the gateway counts since it started, and of what it holds now."""
    gate, door = gateway.gate, gateway.door
    lines = ["# TYPE etude_gateway_requests_total counter"]
    lines += [
        f'etude_gateway_requests_total{{path="{path}",status="{status}"}} {count}'
        for (path, status), count in sorted(gateway.api.tally.items())
    ]
    for name, kind, value in (
        ("sessions_open", "gauge", len(gateway.sessions)),
        ("sessions_opened_total", "counter", gateway.num_opened),
        ("calls_in_flight", "gauge", gate.in_flight),
        ("calls_drawn_total", "counter", gate.num_drawn),
        ("tokens_drawn_total", "counter", gate.tokens_drawn),
        ("sampler_seconds_total", "counter", round(gate.seconds, 6)),
        ("turns_waiting", "gauge", gateway.turns.waiting),
        ("connections", "gauge", len(door.visitors)),
        ("strangers_cut_total", "counter", door.visitors.cut),
        ("paused", "gauge", int(bool(gate.paused))),
        ("weight_version", "gauge", -1 if gate.weight_version is None else gate.weight_version),
    ):
        lines += [f"# TYPE etude_gateway_{name} {kind}", f"etude_gateway_{name} {value}"]
    return ("\n".join(lines) + "\n").encode()
