# pyright: basic
"""`etude gateway serve` as a user starts it: a process, a model directory, a sampler elsewhere."""

import asyncio
import os
import signal

import aiohttp

from etude.gateway.doubles import byte_tokenizer
from etude.runtime.children import etude_command
from etude.sampling.decode_loop import Held
from etude.sampling.doubles import FakeEngine
from etude.sampling.sampler import EngineSampler
from etude.sampling.service import serving

ADMIN = "an-admin-key-of-somebody"
HELD = Held(lineage="l", version=3, digest="")


async def lines(process, number):
    return [(await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()[-1] for _ in range(number)]


async def start(model, url, admin_key):
    environment = os.environ | {"ETUDE_ADMIN_KEY": admin_key}
    command = etude_command("gateway", "serve", "--model", str(model), "--sampler", url)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)


async def test_an_orchestrator_of_somebody_else_gets_the_tokens_that_a_sampler_drew(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    engine = FakeEngine(vocab=200, max_context=512)
    sampler = EngineSampler(engine, sampler_id="s", pool="p", view="fp32", held=HELD)
    async with sampler, serving(sampler) as url:
        process = await start(tmp_path, url, ADMIN)
        model_url, control_url = await lines(process, 2)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as http:
            async with http.post(f"{control_url}/sessions", json={"sampling": {"max_tokens": 5}}) as response:
                opened = await response.json()
            assert opened["base_url"] == model_url
            body = {"messages": [{"role": "user", "content": "hi"}]}
            async with http.post(f"{opened['keyless_url']}/v1/chat/completions", json=body) as response:
                usage = (await response.json())["usage"]
            async with http.get(f"{control_url}/sessions/{opened['session_id']}/rollout") as response:
                rollout = await response.json()
        process.send_signal(signal.SIGINT)
        output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert usage["completion_tokens"] == 5
    (node,) = rollout["nodes"]
    assert (len(node["completion_token_ids"]), node["weight_version"], node["pool"]) == (5, [3, 3], "p")
    assert ADMIN not in (output + errors).decode()


async def test_without_a_good_admin_key_nothing_is_served(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    sampler = EngineSampler(FakeEngine(), sampler_id="s", pool="p", view="fp32", held=HELD)
    async with sampler, serving(sampler) as url:
        process = await start(tmp_path, url, "short")
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert "ETUDE_ADMIN_KEY" in errors.decode()
