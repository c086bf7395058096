# pyright: basic, reportArgumentType=false
"""Sessions of real harnesses, asked again request by request: see tests/harnesses/recorder.py."""

import gzip
import json
from pathlib import Path

from etude.errors import SamplerError
from etude.gateway.doubles import byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.types import SamplingParams

PLAIN = byte_tokenizer()
RECORDINGS = Path(__file__).parent / "recordings"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in RECORDINGS.iterdir())


def load(name):
    """Return a recording: `requests` with path, body and status, and the texts `drawn`, None for a failure."""
    return json.loads(gzip.decompress((RECORDINGS / f"{name}.json.gz").read_bytes()))


def retold(recording, renderer):
    """Return a recording of the same session with a policy of another family."""
    texts = [PLAIN.encode(text, add_special_tokens=False).ids for text in recording["drawn"]]
    return recording | {"drawn": [renderer.answer(dict(ChatMLRenderer(PLAIN).parse(ids))) for ids in texts]}


async def replay(recording, serve, **options):
    """Return the record of the session that a recording leaves; refused requests are left out, they are too short now.

    `options` go to `serve`. Requests come one after the other, in the order in which the harness sent them.
    """
    answers = [SamplerError("away") if text is None else text for text in recording["drawn"]]
    params = SamplingParams(max_tokens=4000)
    fields = {"context_length": 1 << 20, "max_session_tokens": 1 << 20, "max_calls": 200, "params": params, **options}
    async with serve(answers, **fields) as served:
        for request in recording["requests"]:
            if request["status"] != 400:
                url = served.url.removesuffix("/v1") + request["path"]
                async with served.client.post(url, json=request["body"]) as response:
                    assert response.status == request["status"], await response.text()
                    await response.read()
        return await served.close()
