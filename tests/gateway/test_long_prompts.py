# pyright: basic, reportAttributeAccessIssue=false
"""Prompts that take long to make: the same tokens, and other sessions go on meanwhile."""

import asyncio
import threading

from msgspec.structs import replace

from etude.gateway.doubles import byte_tokenizer
from etude.gateway.long_prompts import LONG
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.types import Edge

SHORT = {"role": "user", "content": "fix it"}
WORDS = {"role": "user", "content": "x" * (LONG + 1)}
ROOM = {"context_length": 1 << 18, "max_session_tokens": 1 << 18}


class Watched(ChatMLRenderer):
    """Says which threads render, and waits for a gate when another one than the loop's does."""

    def __init__(self):
        super().__init__(byte_tokenizer(), "chatml-compact")
        self.threads, self.gate, self.begun = [], threading.Event(), threading.Event()
        self.gate.set()

    def _note(self):
        self.threads.append(threading.current_thread() is threading.main_thread())
        if not self.threads[-1]:
            self.begun.set()
            assert self.gate.wait(10)

    def render(self, messages, tools):
        self._note()
        return super().render(messages, tools)

    def extend(self, messages, *, finished):
        self._note()
        return super().extend(messages, finished=finished)


async def test_a_long_prompt_has_the_tokens_that_it_would_have_at_once(serve):
    renderer, plain = Watched(), ChatMLRenderer(byte_tokenizer(), "chatml-compact")
    async with serve(["a", "b", "c"], renderer=renderer, **ROOM) as served:
        _, first = await served.ask(WORDS)
        answer = first["choices"][0]["message"]
        await served.ask(WORDS, answer, WORDS)
        await served.ask(WORDS, answer, SHORT)
        url = f"{served.url}/messages/count_tokens"
        async with served.client.post(url, json={"messages": [WORDS]}) as response:
            counted = (await response.json())["input_tokens"]
        record = await served.close()
    one, two, _ = served.sampler.requests
    assert list(one.prompt_ids) == plain.render([WORDS], [])
    assert counted == len(one.prompt_ids)
    assert two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
    assert list(record.nodes[1].prompt_ids) == plain.extend([WORDS], finished=True)
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]
    assert renderer.threads == [False, False, True]


async def test_other_sessions_are_served_while_a_long_prompt_is_made(serve):
    renderer = Watched()
    renderer.gate.clear()
    async with serve(["a", "b"], renderer=renderer, **ROOM) as served:
        other = await served.gateway.open(replace(served.spec, session_id="other"))
        long = asyncio.create_task(served.ask(WORDS))
        await asyncio.to_thread(renderer.begun.wait, 10)
        status, _ = await served.ask(SHORT, headers={"Authorization": f"Bearer {other}"})
        assert (status, long.done()) == (200, False)
        renderer.gate.set()
        assert (await long)[0] == 200


async def test_a_place_that_changed_while_a_prompt_was_made_is_found_again(serve):
    renderer = Watched()
    async with serve(["a", "b", "c"], renderer=renderer, **ROOM) as served:
        renderer.gate.clear()
        first = asyncio.create_task(served.ask(WORDS))
        await asyncio.to_thread(renderer.begun.wait, 10)
        # The same question at the same time: both are asked before either has a place.
        second = asyncio.create_task(served.ask(WORDS))
        await asyncio.sleep(0.05)
        renderer.gate.set()
        await asyncio.gather(first, second)
        record = await served.close()
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.RETRY]
    assert record.nodes[0].prompt_ids == record.nodes[1].prompt_ids
