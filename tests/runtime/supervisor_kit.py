# pyright: basic
"""Small programs that behave as a run's processes may, and a supervisor in a hurry."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager

from etude.config import SupervisionSection
from etude.runtime.leases import LeaseBook
from etude.runtime.supervisor import Program, Supervisor
from etude.store.local import FileStore
from etude.telemetry.doubles import MemoryLedger

SERVE = """
import http.server, os, signal, sys, threading

class Health(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"ready http://127.0.0.1:{server.server_port} writer-{os.getpid()}", flush=True)
"""
"""Serves /health beside whatever its main thread does next."""

PATIENT = SERVE + "sys.stdin.read()\n"
DEAF = SERVE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()\n"
FLAPPING = SERVE + "sys.exit('error: flapping')\n"
STILLBORN = "import sys; print('first words', file=sys.stderr); sys.exit('error: no such model')"
BLAMING = "import sys; print('error: your model is broken', file=sys.stderr); sys.exit(2)"
SLOW = "import sys; print('loading', file=sys.stderr, flush=True); sys.stdin.read()"


def program(tmp_path, code, name="a-0", kind="sampler"):
    return Program(
        name=name, kind=kind, command=(sys.executable, "-c", code), log=tmp_path / f"{name}.log", environment={}
    )


class Heard:
    """What a listener was told, and a way to wait for it."""

    def __init__(self, supervisor):
        self.events = []
        self._changed = asyncio.Event()
        supervisor.listen(self._up, self._down)

    def _up(self, name, url):
        self._note(("up", name, url))

    def _down(self, name, reason):
        self._note(("down", name, reason))

    def _note(self, event):
        self.events.append(event)
        self._changed.set()

    async def until(self, kind, times=1):
        async with asyncio.timeout(30):
            while sum(event[0] == kind for event in self.events) < times:
                self._changed.clear()
                await self._changed.wait()
        return [event for event in self.events if event[0] == kind][times - 1]


class Supervised:
    """A supervisor and everything it tells."""

    def __init__(self, supervisor, store, ledger, notes):
        self.supervisor, self.store, self.ledger, self.notes = supervisor, store, ledger, notes
        self.heard = Heard(supervisor)


@asynccontextmanager
async def supervised(tmp_path, *, ready_s=30.0, grace_s=5.0, read_end=None, **section):
    settings = {"heartbeat_s": 0.05, "lease_s": 0.5, "backoff_s": 0.01, **section}
    store, ledger, notes = FileStore(tmp_path / "run"), MemoryLedger(), []
    more = {"read_end": read_end} if read_end else {}
    async with (
        LeaseBook(store, lease_s=settings["lease_s"]) as leases,
        Supervisor(
            SupervisionSection(**settings),
            leases,
            ledger=ledger,
            note=notes.append,
            ready_s=ready_s,
            grace_s=grace_s,
            **more,
        ) as supervisor,
    ):
        yield Supervised(supervisor, store, ledger, notes)


SAMPLER = """
import http.server, json, pathlib, sys, threading
import msgspec
from etude.types import Completion, FinishReason, SampleRequest, SamplerStatus

name, mark, told = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
if mark.exists():
    told = {}  # it misbehaves in its first life only
mark.touch()
running, steps, lock = 0, 0, threading.Lock()

class Sampler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        said = {"pool": "p", "view": "fp32", "lineage": "l", "version": 3, "digest": "d3", **told.get("says", {})}
        status = SamplerStatus(sampler_id=name, running=running, steps=steps, **said)
        self.answer(msgspec.json.encode(status))

    def do_POST(self):
        global running, steps
        length = int(self.headers["Content-Length"])
        request = msgspec.msgpack.decode(self.rfile.read(length), type=SampleRequest)
        with lock:
            running += 1
        if told.get("hangs"):
            threading.Event().wait()
        with lock:
            running, steps = running - 1, steps + 1
        tokens = (7,) * request.params.max_tokens
        self.answer(msgspec.msgpack.encode(Completion(
            token_ids=tokens, sampler_logprobs=b"", versions=(), finish_reason=FinishReason.LENGTH, pool="p")))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sampler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"ready http://127.0.0.1:{server.server_port}", flush=True)
sys.stdin.read()
"""
"""Speaks a sampler's protocol without an engine, and misbehaves as it is told in its first life."""


def sampler_program(tmp_path, name, **told):
    command = (sys.executable, "-c", SAMPLER, name, str(tmp_path / f"{name}.mark"), json.dumps(told))
    environment = dict(os.environ)
    return Program(name=name, kind="sampler", command=command, log=tmp_path / f"{name}.log", environment=environment)
