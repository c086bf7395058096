# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""A harness that does all that harnesses do to their conversations, and knows what each of its calls is."""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import count

from etude.gateway.conversation import Conversation
from etude.gateway.doubles import ScriptedSampler, byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import SessionSpec
from etude.types import SamplingParams

TOKENIZER = byte_tokenizer()
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("agent", "shell"))


class PlannedSampler:
    """Draws the text that is planned for a prompt's last user or tool message, when it may; keeps what it saw."""

    def __init__(self):
        self.plans = {}
        self.gates = {}
        self.sequences = {}

    async def sample(self, request):
        shown = TOKENIZER.decode(list(request.prompt_ids), skip_special_tokens=False)
        key = next(name for name in reversed(self.plans) if name in shown)
        answer = self.plans[key].pop(0)
        if key in self.gates:
            await self.gates[key].wait()
        completion = await ScriptedSampler([answer], tokenizer=TOKENIZER).sample(request)
        self.sequences[request.request_id] = [*request.prompt_ids, *completion.token_ids]
        return completion

    async def status(self):
        return []


@dataclass
class Talk:
    """A conversation, and the call that gave its last answer."""

    system: str
    messages: list = field(default_factory=list)
    tools: tuple = TOOLS
    node: int | None = None
    agent: str = "main"


class Harness:
    """Calls are numbered as the tree numbers them: in the order in which they are answered."""

    def __init__(self, *, renderer=ChatMLRenderer, **options):
        self.sampler = PlannedSampler()
        spec = SessionSpec(
            session_id="s",
            purpose="train",
            seed=0,
            params=SamplingParams(max_tokens=1000),
            max_calls=1000,
            max_session_tokens=1_000_000,
        )
        self.session = Session(
            spec,
            sampler=self.sampler,
            renderer=renderer(TOKENIZER, "chatml-compact"),
            context_length=1_000_000,
            call_timeout_s=30.0,
            **options,
        )
        self.expected = []
        self._numbers = count()
        self.main = Talk("You repair code, with the tools that there are.")

    def text(self, kind):
        """Return a text that is said only once, and that no other one is in."""
        return f"{kind} number {next(self._numbers)}, which is a text of its own."

    async def send(self, talk, tail, answer, **hints):
        """Ask for the answer that is planned for a conversation with one more message, and return it."""
        messages = [{"role": "system", "content": talk.system}, *talk.messages, *tail]
        key = messages[-1]["content"]
        self.sampler.plans.setdefault(key, []).append(answer)
        requested = {"max_tokens": hints.pop("max_tokens")} if "max_tokens" in hints else {}
        call = ModelCall(
            conversation=Conversation(messages=tuple(messages), tools=talk.tools),
            body_key=self.text("body"),
            requested=requested,
            **{"model": "big", **hints},
        )
        return (await self.session.submit(call)).message

    async def ask(self, talk, tail, edge, *, link=None, answer=None, **hints):
        """Go on with a conversation, and note what the call must be found to be."""
        answer = answer or self.text("answer")
        message = await self.send(talk, tail, answer, **hints)
        self.expected.append((edge, link))
        talk.messages = [*talk.messages, *tail, message]
        talk.node = len(self.expected) - 1
        return message

    def user(self, kind="question"):
        return [{"role": "user", "content": self.text(kind)}]

    async def start(self):
        await self.ask(self.main, self.user("task"), "root")

    async def go_on(self, talk=None):
        await self.ask(talk or self.main, self.user(), "continuation")

    async def retry(self):
        """Ask for the last answer again, and go on from the new one."""
        talk, first = self.main, self.main.node
        while self.expected[first][0] == "retry":
            first = self.expected[first][1]
        *before, asked, _ = talk.messages
        talk.messages = before
        await self.ask(talk, [asked], "retry", link=first)

    async def fork(self):
        """Ask two questions at once, and go on from the second."""
        tails = [self.user(), self.user()]
        answers = await asyncio.gather(*(self.send(self.main, tail, self.text("answer")) for tail in tails))
        self.expected += [("continuation", None)] * 2
        self.main.messages = [*self.main.messages, *tails[1], answers[1]]
        self.main.node = len(self.expected) - 1

    async def compact(self):
        """Begin anew with a summary that the policy writes."""
        talk, summary = self.main, self.text("summary")
        await self.ask(
            talk, self.user("wish for a summary of all that was said so far"), "continuation", answer=summary
        )
        talk.messages = []
        tail = [{"role": "user", "content": f"Go on.\nYou wrote:\n{summary}"}]
        await self.ask(talk, tail, "compaction", link=talk.node)

    async def delegate(self, turns=1):
        """Have a sub-agent answer a question."""
        talk, prompt = self.main, self.text("prompt")
        call = {"name": "agent", "arguments": {"prompt": prompt}}
        await self.ask(talk, self.user(), "continuation", answer=f"<tool_call>{json.dumps(call)}</tool_call>")
        helper = Talk(self.text("You are a helper"), tools=TOOLS[1:])
        tail = [{"role": "user", "content": f"<reminder>be brief</reminder>\n{prompt}"}]
        answer = await self.ask(helper, tail, "subagent_call", link=talk.node)
        for _ in range(turns):
            answer = await self.ask(helper, self.user(), "continuation")
        result = [{"role": "tool", "content": f"The helper says: {answer['content']}"}]
        await self.ask(talk, result, "subagent_return", link=helper.node)

    async def title(self):
        """Ask for something that is nothing of the task."""
        talk = Talk(self.text("You write titles"), tools=())
        await self.ask(talk, self.user("conversation"), "auxiliary", model="small", max_tokens=32)

    async def rewrite(self):
        """Say another first message than before."""
        first = self.main.messages[0]
        self.main.messages[0] = {**first, "content": self.text("edited task")}
        await self.ask(self.main, self.user(), "rewrite", link=...)

    async def change_tools(self):
        """Offer tools that were never offered before."""
        self.main.tools = (*TOOLS, {"type": "function", "function": {"name": self.text("tool")}})
        await self.ask(self.main, self.user(), "tools_changed", link=...)

    async def run_ahead(self):
        """Go on from an answer before it is there, as one who knows it: the parent is answered after its child."""
        talk, tail, answer = self.main, self.user(), self.text("answer")
        gate = self.sampler.gates[tail[0]["content"]] = asyncio.Event()
        parent = asyncio.ensure_future(self.send(talk, tail, answer))
        await asyncio.sleep(0)
        foreseen = [*tail, {"role": "assistant", "content": answer}, *self.user()]
        ahead = await self.send(talk, foreseen, self.text("answer"))
        gate.set()
        await parent
        self.expected += [("continuation", None)] * 2
        talk.messages = [*talk.messages, *foreseen, ahead]
        talk.node = len(self.expected) - 2


MOVES = {
    "go_on": Harness.go_on,
    "retry": Harness.retry,
    "fork": Harness.fork,
    "compact": Harness.compact,
    "delegate": Harness.delegate,
    "title": Harness.title,
    "rewrite": Harness.rewrite,
    "change_tools": Harness.change_tools,
    "run_ahead": Harness.run_ahead,
}


async def play(script):
    """Return a harness that made these moves, and the record of its session."""
    harness = Harness()
    await harness.start()
    for move in script:
        await MOVES[move](harness)
    return harness, await harness.session.close()
