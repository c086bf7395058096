"""What people read on one line, whatever the text contains."""

from collections.abc import Mapping

_STEP_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", ".3f"),
    ("pass", "reward/pass_rate", ".3f"),
    ("stale", "staleness/mean_versions", ".2f"),
    ("max", "staleness/max_versions", ".0f"),
    ("drawn/s", "sampling/tokens_per_s", ",.0f"),
    ("trained/s", "trainer/tokens_per_s", ",.0f"),
    ("grad", "trainer/grad_norm", ".3g"),
    ("entropy", "policy/entropy_nats", ".3f"),
)
_LOSSES: tuple[tuple[str, str], ...] = (
    ("infra errors", "rollout/infra_errors_count"),
    ("groups lost", "rollout/groups_lost_count"),
)
_K3 = "mismatch/k3/"


def printable(text: str, *, limit: int = 2000) -> str:
    """Return text that cannot move the cursor, colour, ring or reorder: whatever does not print is escaped."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def step_line(row: Mapping[str, object], *, total: int | None = None) -> str:
    """Return one line for one optimizer step; what the row lacks is left out."""
    parts = [f"step {row.get('step', '?')}" + (f"/{total}" if total else ""), f"v{row.get('version', '?')}"]
    parts += [f"{label} {format(row[name], spec)}" for label, name, spec in _STEP_FIELDS if _is_number(row.get(name))]
    mismatch = {name.removeprefix(_K3): value for name, value in row.items() if name.startswith(_K3)}
    if mismatch:
        parts.append("k3 " + " ".join(f"{pool} {value:.2e}" for pool, value in mismatch.items() if _is_number(value)))
    parts += [f"{label} {row[name]:.0f}" for label, name in _LOSSES if _is_number(row.get(name)) and row[name]]
    return printable("  ".join(parts))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
