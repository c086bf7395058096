"""A report as people read it."""

from etude.runtime.audit.findings import Finding, Report
from etude.telemetry.lines import printable

_HOLDS, _BROKEN = "holds", "BROKEN"


def report_text(report: Report) -> str:
    """Return one line per invariant, what is wrong under it, and what became of everything."""
    width = max(len(finding.name) for finding in report.findings)
    lines = [f"{printable(report.run)}: {report.state}, {report.ledger_facts} facts, {report.files} files"]
    for finding in report.findings:
        lines += _finding_lines(finding, width)
    for name, parts in report.totals.items():
        account = ", ".join(f"{count} {printable(reason)}" for reason, count in parts.items())
        lines.append(f"{name}: {account or 'none'}")
    if report.seal:
        lines.append(f"seal: {report.seal}")
    broken = [finding.name for finding in report.findings if finding.violations]
    verdict = f"{len(broken)} of {len(report.findings)} invariants do not hold: {', '.join(broken)}"
    lines.append(verdict if broken else f"all {len(report.findings)} invariants hold ({report.seconds:.1f} s)")
    return "\n".join(lines)


def _finding_lines(finding: Finding, width: int) -> list[str]:
    state = _BROKEN if finding.violations else _HOLDS
    count = f"{finding.violations} of {finding.checked}" if finding.violations else f"{finding.checked}"
    lines = [f"  {state:<6}  {finding.name:<{width}}  {count:>8}  {finding.meaning}"]
    lines += [f"          {printable(text)}" for text in finding.first]
    if finding.violations > len(finding.first):
        lines.append(f"          and {finding.violations - len(finding.first)} more")
    return [*lines, *(f"          note: {printable(note)}" for note in finding.notes)]
