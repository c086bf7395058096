# pyright: basic
"""Records what real harnesses ask their gateway, for tests that have none: tests/gateway/recordings.

    python tests/harnesses/recorder.py

plays the sessions of `claude_code_kit` and `codex_kit` anew. Of long texts, such as the system prompt and the
descriptions of tools, a recording has the beginning and a digest only, but those of users and results of tools are as
long as they were; who the machine and the user are is left out. Ids of calls become those that a session called `s`
would have given.
"""

import asyncio
import gzip
import json
import re
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import aiohttp
import claude_code_kit
import codex_kit
from aiohttp import web
from harness_kit import ROOT, Wire, stage

from etude.gateway.doubles import Prompt

RECORDINGS = ROOT / "tests/gateway/recordings"
SESSIONS = {
    "claude-code-busy": (claude_code_kit, "busy and cut off"),
    "claude-code-tidied": (claude_code_kit, "tidied calls"),
    "claude-code-delegates": (claude_code_kit, "sub-agents"),
    "claude-code-window": (claude_code_kit, "compaction"),
    "claude-code-overflow": (claude_code_kit, "overflow"),
    "claude-code-search": (claude_code_kit, ""),
    "codex-busy": (codex_kit, "busy and cut off"),
    "codex-delegates": (codex_kit, "sub-agents"),
    "codex-window": (codex_kit, "compaction"),
}
"""The kits' sessions; one more is played with tools that the recipe takes away."""

_MOST_CHARS = 80
_MARK_CHARS = 12
_LEFT_OUT = frozenset(("client_metadata", "metadata", "prompt_cache_key"))
_OWN_CALL = re.compile(r"[0-9a-f]{24}")


class RecordingWire(Wire):
    """A wire that keeps the requests, in the order in which they arrive."""

    requests: list[dict]

    async def start(self) -> None:
        self.requests = []
        self._http = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        _WIRES.append(self)

    async def stop(self) -> None:
        await self._http.close()
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        return self._runner.addresses[0][1]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        is_call = request.method == "POST"
        number, self.num_requests = self.num_requests, self.num_requests + is_call
        kept: dict = {"path": request.path, "body": body.decode()}
        if is_call:
            self.requests.append(kept)
        headers = {name: text for name, text in request.headers.items() if name not in ("Host", "Content-Length")}
        url = f"http://127.0.0.1:{self.gateway.port}{request.path_qs}"
        async with self._http.request(request.method, url, data=body, headers=headers) as answer:
            kept["status"] = answer.status
            told = await answer.read()
        if number in self.cut and is_call:
            assert request.transport
            self.num_cut += 1
            request.transport.abort()
        passed = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
        return web.Response(body=told, status=answer.status, headers=passed)


_WIRES: list[RecordingWire] = []


async def record(name: str) -> dict:
    """Play a session and return its recording."""
    kit, plan = SESSIONS[name]
    answer, options = kit.plans()[plan] if plan else (claude_code_kit.searches(), {})
    command = kit.HARNESS.command if plan else claude_code_kit.WITH_SEARCH
    drawn: list[str | None] = []

    def watched(prompt: Prompt) -> str:
        drawn.append(None)
        drawn[-1] = text = answer(prompt)
        return text

    with tempfile.TemporaryDirectory() as directory:
        async with stage(kit.HARNESS.model_copy(update={"command": command}), Path(directory)) as played:
            session = await played.play(watched, **kit.in_window(options), wire_type=RecordingWire)
    assert session.trajectory.reward == 1.0, f"{name}: {session.trajectory.failure} {session.said[-2000:]}"
    known = {_call_id(session.trajectory.session_id, n): _call_id("s", n) for n in range(len(session.trajectory.nodes))}
    said = {line for text in drawn if text for line in _lines(text)}
    requests = [
        {
            "path": request["path"],
            "status": request["status"],
            "body": _shortened(
                json.loads(_OWN_CALL.sub(lambda found: known.get(found[0], found[0]), request["body"])), said
            ),
        }
        for request in _WIRES[-1].requests
    ]
    return {
        "harness": json.loads((Path(kit.HARNESS.files) / "harness.json").read_text()),
        "drawn": drawn,
        "requests": requests,
    }


def _call_id(session_id: str, number: int) -> str:
    return sha256(f"{session_id}/{number}".encode()).hexdigest()[:24]


def _lines(text: str) -> list[str]:
    """Return what of an answer may be quoted later: its lines, and the texts in its calls."""
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    told = [value for call in calls for value in json.loads(call)["arguments"].values() if isinstance(value, str)]
    spoken = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
    return [line for piece in [spoken, *told] for line in piece.splitlines() if len(line) >= _MARK_CHARS]


def _shortened(body: dict, said: set[str]) -> dict:
    def walk(value, *, keep_length: bool):
        if isinstance(value, dict):
            keep_length = keep_length or value.get("role") == "user" or str(value.get("type")).endswith("_output")
            return {name: walk(item, keep_length=keep_length) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, keep_length=keep_length) for item in value]
        return _cut(value, said, keep_length=keep_length) if isinstance(value, str) else value

    return {name: walk(item, keep_length=False) for name, item in body.items() if name not in _LEFT_OUT}


def _cut(text: str, said: set[str], *, keep_length: bool) -> str:
    """Return the beginning of a long text; of one that quotes the policy the quotes, and the beginnings of lines."""
    if any(quote in text for quote in said) and "\n" in text:
        return "\n".join(_cut(line, said, keep_length=keep_length) for line in text.split("\n"))
    if len(text) <= _MOST_CHARS or any(quote in text for quote in said):
        return text
    cut = f"{text[:_MOST_CHARS]} [{len(text)} characters, {sha256(text.encode()).hexdigest()[:16]}]"
    return cut.ljust(len(text), ".") if keep_length else cut


async def main() -> None:
    for name in sys.argv[1:] or SESSIONS:
        data = json.dumps(await record(name), indent=1).encode()
        RECORDINGS.mkdir(exist_ok=True)
        path = RECORDINGS / f"{name}.json.gz"
        path.write_bytes(gzip.compress(data, mtime=0))
        sys.stdout.write(f"{name:<24} {len(data):>9} {path.stat().st_size:>7}\n")


if __name__ == "__main__":
    asyncio.run(main())
