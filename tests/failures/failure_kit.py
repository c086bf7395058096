# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
"""What the failure tests share: conversations, requests, and a bound on waiting for something that never comes."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import aiohttp

from etude.config import HarnessSection
from etude.gateway.conversation import Conversation
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import Capabilities, ExecResult, Grade, SessionSpec
from etude.rollout.doubles import ScriptedEnvironment
from etude.rollout.player import HarnessPlayer
from etude.sampling.decode_loop import Held
from etude.sampling.sampler import EngineSampler
from etude.types import SampleRequest, SamplingParams, Task

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "fix it"}
TOOLS = ({"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}},)
LS = '<tool_call>{"name": "shell", "arguments": {"command":  "ls"}}</tool_call>'
SOON_S = 0.3
"""Long enough for anything that answers at all, short enough to be waited for in vain."""


async def hangs(waiting) -> bool:
    """Whether something is still not done after a bounded wait; it is cancelled then."""
    try:
        async with asyncio.timeout(SOON_S):
            await waiting
    except TimeoutError:
        return True
    return False


async def until(holds, *, within_s=20.0) -> None:
    """Wait until a condition holds that another thread or process brings about, and offers no event for."""
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def task(name="t", **fields) -> Task:
    return Task(task_id=name, path=f"/tasks/{name}", digest="d", instruction="fix it", **fields)


def request(name, prompt=(1, 2, 3), **params) -> SampleRequest:
    return SampleRequest(request_id=name, session_id=name, prompt_ids=prompt, params=SamplingParams(**params))


def sampler(engine, *, version=3, **options) -> EngineSampler:
    held = Held(lineage="l", version=version, digest=f"d{version}")
    return EngineSampler(engine, sampler_id="s0", pool="local", view="fp32", held=held, **options)


class Recording:
    """A sampler that keeps what it was shown and what it drew."""

    def __init__(self, inner):
        self.inner = inner
        self.requests = []
        self.drawn = []

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and drawn tokens of every answered request."""
        return [[*asked.prompt_ids, *ids] for asked, ids in zip(self.requests, self.drawn, strict=True)]

    async def sample(self, request):
        completion = await self.inner.sample(request)
        self.requests.append(request)
        self.drawn.append(completion.token_ids)
        return completion

    async def status(self):
        return await self.inner.status()


class Talk:
    """A harness in front of a session of the gateway."""

    def __init__(self, answers, *, renderer=None, drawing=None, tools=(), context_length=4000, **spec):
        self.sampler = Recording(drawing or ScriptedSampler(answers, tokenizer=TOKENIZER))
        self.renderer = renderer or ChatMLRenderer(TOKENIZER, "chatml-compact")
        self.tools = tools
        fields = {"session_id": "s", "purpose": "train", "seed": 7, "max_calls": 20, "max_session_tokens": 4000}
        self.session = Session(
            SessionSpec(**{**fields, "params": SamplingParams(max_tokens=200), **spec}),
            sampler=self.sampler,
            renderer=self.renderer,
            context_length=context_length,
            call_timeout_s=10.0,
        )

    async def ask(self, *messages):
        """Return the answer of the gateway to a conversation."""
        key = sha256(repr((messages, self.tools)).encode()).hexdigest()
        conversation = Conversation(messages=messages, tools=tuple(self.tools))
        return await self.session.submit(ModelCall(conversation=conversation, body_key=key))

    async def go_on(self, *tails):
        """Let the conversation grow turn by turn, as a harness does that keeps every answer; return it."""
        messages = [USER]
        for tail in (*tails, None):
            answer = await self.ask(*messages)
            messages.append({"role": "assistant", **answer.message})
            if tail is not None:
                messages.append({"role": "user", "content": tail})
        return messages


def branch_tokens(nodes, leaf) -> list[int]:
    """Return the tokens from the root of a session's tree to the last drawn one of a node."""
    before = [] if leaf.parent is None else branch_tokens(nodes, nodes[leaf.parent])
    return [*before, *leaf.prompt_ids, *leaf.completion.token_ids]


class Chat:
    """What an agent in the sandbox has of the model: a URL and a key."""

    def __init__(self, client, url, key, task):
        self.client, self.url, self.key, self.task = client, url, key, task

    async def ask(self, *messages, **fields):
        """Return status and decoded body of a call."""
        body = {"model": "m", "messages": list(messages), **fields}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.client.post(f"{self.url}/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.json()


class Agents:
    """Sandboxes in which an agent runs that is a function of a `Chat`."""

    capabilities = Capabilities()

    def __init__(self, agent):
        self.agent = agent

    @asynccontextmanager
    async def create(self, task, *, model_port=None):
        async with aiohttp.ClientSession() as client:
            yield _Agent(lambda key: self.agent(Chat(client, f"http://127.0.0.1:{model_port}/v1", key, task)))

    async def close(self):
        pass


class _Agent(ScriptedEnvironment):
    def __init__(self, work):
        super().__init__(None, {})
        self.work = work

    async def execute(self, command, *, timeout_s, env, **_):
        try:
            async with asyncio.timeout(timeout_s):
                code = await self.work(env["OPENAI_API_KEY"])
        except TimeoutError:
            return ExecResult(exit_code=-9, stdout=b"", stderr=b"", timed_out=True)
        return ExecResult(exit_code=code or 0, stdout=b"", stderr=b"")


class FlatGrader:
    """Gives every attempt the same reward."""

    def __init__(self, reward=1.0):
        self.reward = reward

    async def grade(self, task, change):
        return Grade(reward=self.reward)


@asynccontextmanager
async def playing(
    agent, drawing, *, grader=None, context_length=2000, params=None, on_record=None, overhead_s=60.0, **limits
):
    """Yield a player whose agents meet the real gateway in front of a sampler."""
    gateway = Gateway(
        sampler=drawing, renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"), context_length=context_length
    )
    async with AsyncExitStack() as stack:
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        yield HarnessPlayer(
            host=gateway,
            backend=Agents(agent),
            grader=grader or FlatGrader(),
            harness=HarnessSection(**limits),
            params=params or SamplingParams(max_tokens=50),
            on_record=on_record,
            overhead_s=overhead_s,
        )
