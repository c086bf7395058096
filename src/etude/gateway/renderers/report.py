"""What `etude gateway check` says of a model directory."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from etude.gateway.renderers.family import Tail, tail_of
from etude.gateway.renderers.proof import Break, Probe, find_breaks, probes_for
from etude.gateway.renderers.registry import choose, differing_text, prove, read_model_files


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations go on with a template or a renderer."""

    tried: int
    refused: int
    """Conversations that cannot be rendered at all."""
    tells_tools: bool
    """Whether tool definitions get into the prompt."""
    tells_calls: bool
    """Whether tool calls get into the history."""
    extended: list[Tail]
    """Roles of new messages after which every conversation goes on token by token."""
    branches: list[Tail]
    """Roles after which some conversation does not."""
    first_break: Break | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory's template, and the renderer that a run would use."""

    model: str
    renderer: str
    same_texts: bool | None
    """Whether the renderer's texts are the template's; None without a template."""
    first_difference: str
    template: Findings | None
    used: Findings

    @property
    def holds(self) -> bool:
        """Whether every conversation goes on token by token, those with tools included."""
        return not self.used.branches and self.used.tells_tools and self.used.tells_calls


def examine(model_dir: str | Path, name: str = "auto") -> Report:
    """Try a model directory's template and the renderer called `name`; raise `PolicyError` when nothing fits."""
    files = read_model_files(model_dir)
    choice = choose(files, name)
    used_probes = probes_for(choice.renderer)
    used = _findings(used_probes, find_breaks(choice.renderer, used_probes))
    if files.template is None:
        return Report(
            model=str(files.directory),
            renderer=choice.name,
            same_texts=None,
            first_difference="",
            template=None,
            used=used,
        )
    proof = prove(files.tokenizer, files.template)
    differing = differing_text(choice.renderer, proof.renderer)
    return Report(
        model=str(files.directory),
        renderer=choice.name,
        same_texts=differing is None,
        first_difference="" if differing is None else _difference(*differing),
        template=_findings(proof.probes, proof.breaks),
        used=used,
    )


def lines_of(report: Report) -> Iterator[str]:
    """Yield a report for people."""
    yield f"{report.model}: renderer {report.renderer}"
    if report.same_texts is None:
        yield "there is no chat template to compare it with"
    else:
        yield "its texts are those of the chat template" if report.same_texts else report.first_difference
    if report.template is not None:
        yield from _lines("chat template", report.template)
    yield from _lines(f"renderer {report.renderer}", report.used)


def _lines(title: str, findings: Findings) -> Iterator[str]:
    yield f"{title}: {findings.tried} conversations tried, {findings.refused} of them refused"
    yield f"  goes on token by token after: {_tails(findings.extended)}"
    yield f"  starts a branch after: {_tails(findings.branches)}"
    if not findings.tells_tools:
        yield "  does not tell the model which tools there are"
    if not findings.tells_calls:
        yield "  does not show tool calls in the history"
    found = findings.first_break
    if found is None:
        return
    yield f"  first break: {found.probe}"
    yield f"    {found.reason}"
    if found.position >= 0:
        yield (
            f"    token {found.position}: drawn {found.drawn_id} {found.drawn_text!r}, "
            f"later rendered {found.rendered_id} {found.rendered_text!r}"
        )


def _tails(tails: list[Tail]) -> str:
    return ", ".join(" + ".join(tail) for tail in tails) or "nothing"


def _findings(probes: list[Probe], breaks: list[Break]) -> Findings:
    broken = {found.tail for found in breaks if not found.refused}
    told = {found.probe for found in breaks}
    held = {tail_of(probe.tail) for probe in probes if probe.name not in told} - broken
    counted = [found for found in breaks if not found.refused]
    return Findings(
        tried=len(probes),
        refused=len(breaks) - len(counted),
        tells_tools=any(probe.tools for probe in probes),
        tells_calls=any("tool_calls" in probe.answer for probe in probes),
        extended=sorted(held),
        branches=sorted(broken),
        first_break=counted[0] if counted else None,
    )


def _difference(found: str, expected: str) -> str:
    place = next(
        (place for place, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    return (
        f"its texts are not those of the chat template: after {found[max(0, place - 40) : place]!r} it writes "
        f"{found[place : place + 40]!r}, the template {expected[place : place + 40]!r}"
    )
