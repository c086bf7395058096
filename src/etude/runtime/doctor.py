"""What ails a run, from outside: its leases, its controller's own word, and the last lines of its logs."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from etude.errors import EtudeError, ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.runtime.directory import CONFIG_KEY, RunDirectory
from etude.runtime.host_checks import Finding, State, check_host
from etude.runtime.services import ControllerState, Lease, is_alive, read_controller, read_leases, this_host
from etude.telemetry.lines import printable
from etude.telemetry.waits import Wait

_SILENT_S = 15.0
"""Beyond it a controller that writes every second is no longer heard of."""
_BLOCKED_S = 3.0
_LATE_SHARE = 0.5
"""Share of its deadline after which a wait is worth a warning."""
_TAIL_BYTES = 4000


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out."""

    run: str = ""
    """How the user calls the run; empty when only the host was looked at."""
    state: str = ""
    """`live`, `ended` (in order), `failed` (with an error), `crashed`, or `idle`: never started."""
    host: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    """About the run."""
    waits: tuple[Wait, ...] = ()
    """Of a live run, the one closest to its deadline first."""
    now: float = 0.0
    """When this was; the times of `waits` compare with it."""
    next_action: str = ""

    @property
    def is_host_well(self) -> bool:
        """Whether this machine can do what a run needs."""
        return all(finding.state is not State.PROBLEM for finding in self.host)

    @property
    def is_run_well(self) -> bool:
        """Whether the run goes on, or ended in order."""
        return all(finding.state is not State.PROBLEM for finding in self.findings)


async def diagnose_host(place: Path, *, now: float) -> Diagnosis:
    """Look at this machine alone."""
    host = tuple(await check_host(place))
    return Diagnosis(host=host, now=now, next_action=_next(host) or "nothing: this machine is ready")


async def diagnose_run(
    directory: RunDirectory, *, now: float, check: Callable[[Path], Awaitable[list[Finding]]] = check_host
) -> Diagnosis:
    """Look at a run, and `check` this machine when the run lies on it.

    Raises:
        StoreError: There is no run, or its directory cannot be read.
    """
    store, url = directory.store, directory.url
    try:
        await store.get(CONFIG_KEY)
    except ObjectMissingError as error:
        raise StoreError(f"there is no run at {url}: it has no {CONFIG_KEY}; give the value of run.url") from error
    is_here = "://" not in url.removeprefix("file://")
    host = tuple(await check(directory.local)) if is_here else ()
    controller, findings = await _read_controller(store)
    leases: list[Lease] = []
    try:
        leases = await read_leases(store)
    except EtudeError as error:
        findings.append(Finding(name="leases", state=State.WARNING, detail=str(error)))
    state = _state(controller, now)
    findings += _of_controller(controller, state, now)
    findings += [_of_lease(lease, state, now) for lease in leases]
    waits: tuple[Wait, ...] = ()
    if controller is not None and state == "live":
        waits = tuple(sorted(controller.waits, key=lambda wait: wait.until))
        findings += _of_waits(waits, now)
    if state in ("crashed", "failed") or any(finding.state is State.PROBLEM for finding in findings):
        findings += _of_logs(directory.local / "logs")
    return Diagnosis(
        run=url,
        state=state,
        host=host,
        findings=tuple(findings),
        waits=waits,
        now=now,
        next_action=_next((*findings, *host)) or _in_order(state, url),
    )


async def _read_controller(store: ObjectStore) -> tuple[ControllerState | None, list[Finding]]:
    try:
        return await read_controller(store), []
    except EtudeError as error:
        return None, [Finding(name="controller", state=State.WARNING, detail=str(error))]


def _state(controller: ControllerState | None, now: float) -> str:
    if controller is None:
        return "idle"
    if controller.ended:
        return "failed" if controller.error else "ended"
    if controller.host == this_host():
        return "live" if is_alive(controller.pid) else "crashed"
    return "live" if now - controller.written < _SILENT_S else "crashed"


def _of_controller(controller: ControllerState | None, state: str, now: float) -> list[Finding]:
    """Say how the process of `etude run` is."""
    if controller is None:
        return [Finding(name="controller", state=State.OK, detail="was never started", action="etude run RECIPE")]
    who = f"process {controller.pid} on {controller.host}"
    resume = "run the same command again: it resumes"
    if state == "failed":
        return [Finding(name="controller", state=State.PROBLEM, detail=f"ended: {controller.error}", action=resume)]
    if state == "ended":
        return [Finding(name="controller", state=State.OK, detail=f"{who} ended in order")]
    silent = now - controller.written
    if state == "crashed":
        where = "it died" if controller.host == this_host() else "it died, or its machine or network did"
        detail = f"{who} was last heard of {_ago(silent)}: {where}"
        return [Finding(name="controller", state=State.PROBLEM, detail=detail, action=resume)]
    if silent > _SILENT_S:
        detail = f"{who} lives but has not written for {_ago(silent)}: it is stopped, or the store does not answer"
        action = f"kill -CONT {controller.pid}, or look at the store; else end it and run the same command again"
        return [Finding(name="controller", state=State.PROBLEM, detail=detail, action=action)]
    late = controller.written - controller.beat
    if late > _BLOCKED_S:
        detail = f"its event loop has stood still for {late:.0f} s, in {controller.blocked_in or 'an unknown place'}"
        action = "wait if that is known to be slow; else report it with this line"
        return [Finding(name="controller", state=State.PROBLEM, detail=detail, action=action)]
    detail = f"{who}, {controller.stage or 'between stages'}, event loop at most {controller.lag_s:.2f} s late"
    return [Finding(name="controller", state=State.OK, detail=detail)]


def _of_lease(lease: Lease, state: str, now: float) -> Finding:
    """Say how a process of the run is."""
    name, who = f"{lease.kind} {lease.name}".removeprefix("trainer "), f"process {lease.pid} on {lease.host}"
    again = f", started {lease.restarts} times again" if lease.restarts else ""
    is_here = lease.host == this_host()
    if lease.ended:
        detail = f"{who} ended {_ago(now - lease.ended)} ago" + (f": {lease.reason}" if lease.reason else "")
        problem = state == "live"
        action = "wait: its supervisor starts it again, or ends the run" if problem else ""
        return Finding(name=name, state=State.WARNING if problem else State.OK, detail=detail + again, action=action)
    if state != "live":
        if is_here and is_alive(lease.pid):
            action = f"wait a few seconds: it ends when it notices; else kill {lease.pid}"
            return Finding(name=name, state=State.WARNING, detail=f"{who} outlives its controller", action=action)
        return Finding(name=name, state=State.OK, detail=f"{who} ended with its controller")
    if is_here and not is_alive(lease.pid):
        action = "wait: its supervisor notices within seconds"
        return Finding(name=name, state=State.WARNING, detail=f"{who} is dead" + again, action=action)
    if now > lease.expires:
        detail = f"{who}: its lease ran out {_ago(now - lease.expires)} ago"
        action = "its supervisor hangs or cannot write: see the controller"
        return Finding(name=name, state=State.PROBLEM, detail=detail, action=action)
    detail = f"{who}, {lease.url or 'comes up'}{again}"
    return Finding(name=name, state=State.WARNING if lease.restarts else State.OK, detail=detail)


def _of_waits(waits: Sequence[Wait], now: float) -> list[Finding]:
    """Point at the waits that have used up most of their time."""
    return [
        Finding(
            name="wait",
            state=State.WARNING,
            detail=f"{wait.owner} has waited {_ago(now - wait.since)} for {wait.name} on {wait.on}",
            action=f"look at {wait.on}; the run ends with this name in {_ago(wait.until - now)}",
        )
        for wait in waits
        if now - wait.since > _LATE_SHARE * (wait.until - wait.since)
    ]


def _of_logs(logs: Path) -> list[Finding]:
    """Quote the last words of every process whose log ends in an error."""
    findings: list[Finding] = []
    for path in sorted(logs.glob("*.log")):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        if lines:
            said = printable(lines[-1], limit=300)
            findings.append(Finding(name=path.name, state=State.WARNING, detail=said, action=f"read {path}"))
    return findings


def _next(findings: Sequence[Finding]) -> str:
    """Return what to do about the worst finding."""
    for state in (State.PROBLEM, State.WARNING):
        for finding in findings:
            if finding.state is state and finding.action:
                return f"{finding.name}: {finding.action}"
    return ""


def _in_order(state: str, url: str) -> str:
    if state == "live":
        return "nothing: the run goes on"
    return f"etude status {url}" if state == "ended" else "etude run RECIPE starts it"


def _ago(seconds: float) -> str:
    """Return a time that people read."""
    seconds = max(0.0, seconds)
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
