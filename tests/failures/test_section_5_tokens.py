# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
"""Tokens that are not those that were drawn, and answers that were cut."""

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from failure_kit import LS, TOKENIZER, TOOLS, USER, Talk, branch_tokens, playing, task
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from etude.algorithm.doubles import GroupPlan as SyntheticPlan
from etude.algorithm.doubles import synthetic_group
from etude.algorithm.ingest import IngestRules
from etude.algorithm.samples import SampleRules, samples_of
from etude.gateway.doubles import ScriptedSampler
from etude.gateway.refusals import CallRefusedError
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.service import Gateway
from etude.interfaces import SessionSpec
from etude.learning_config import AlgorithmSection
from etude.rollout.buffer import Ticket
from etude.rollout.group import GroupPlan, play_group
from etude.rollout.record import encode_record
from etude.types import Completion, Edge, FinishReason, Outcome, SamplingParams

FAMILIES = ("chatml", "chatml-compact")
MINI = Path(__file__).parents[2] / "harnesses" / "mini" / "mini.py"


@pytest.mark.row("P-53")
@pytest.mark.parametrize("family", FAMILIES)
async def test_what_a_template_adds_after_a_turn_belongs_to_the_next_prompt(family):
    """The line break after a drawn turn is part of the next prompt: no turn shifts, in any family."""
    renderer = ChatMLRenderer(TOKENIZER, family)
    talk = Talk(["one", "two", "three"], renderer=renderer)
    messages = await talk.go_on("and then", "and now")
    nodes = (await talk.session.close()).nodes

    # The mistake: turns as the template spells them, next to log-probabilities of turns as the engine drew them.
    answers = [message for message in messages if message["role"] == "assistant"]
    templated = [[*renderer.answer(answer), *TOKENIZER.encode("\n").ids] for answer in answers]
    assert [len(turn) for turn in templated] == [len(drawn) + 1 for drawn in talk.sampler.drawn]

    assert [node.completion.token_ids for node in nodes] == talk.sampler.drawn
    assert [branch_tokens(nodes, node) for node in nodes] == talk.sampler.sequences
    for turn in (1, 2):
        before = talk.sampler.sequences[turn - 1]
        assert list(talk.sampler.requests[turn].prompt_ids[: len(before)]) == before
    assert list(talk.sampler.requests[2].prompt_ids) == renderer.render(messages[:5], ())


@pytest.mark.row("P-54")
async def test_what_is_trained_on_is_what_was_captured_whatever_the_harness_made_of_it():
    """Training reads the captured tokens, so a harness that clears its tool calls changes nothing that is trained."""
    talk = Talk([LS, "done"], tools=TOOLS)
    first = await talk.ask(USER)
    cleared = {"role": "assistant", "content": first.message["content"] or ""}
    await talk.ask(USER, cleared, {"role": "tool", "content": "a.py"})
    record = await talk.session.close()

    # The mistake: to render what the rollout kept, with the calls that the policy was not shown.
    kept = [USER, {"role": "assistant", **first.message}, {"role": "tool", "content": "a.py"}]
    assert talk.renderer.render(kept, TOOLS) != list(talk.sampler.requests[1].prompt_ids)

    assert [branch_tokens(record.nodes, node) for node in record.nodes] == talk.sampler.sequences
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.REWRITE]


class Forgetful(ChatMLRenderer):
    """A template that shows only the newest reasoning, so that no history can be extended once it was left out."""

    def render(self, messages, tools):
        shown = [{name: message[name] for name in message if name != "reasoning_content"} for message in messages]
        return super().render(shown, tools)

    def extend(self, messages, *, finished):
        return None


@pytest.mark.row("P-55")
async def test_a_history_that_is_rewritten_starts_a_branch_and_stops_nothing():
    """A template or a harness that rewrites history starts a new branch, which is counted; nothing is asserted."""
    answers = [f"<think>\nhm\n</think>\n\n{word}" for word in ("one", "two", "three")]
    talk = Talk(answers, renderer=Forgetful(TOKENIZER))
    await talk.go_on("and then", "and now")
    record = await talk.session.close()

    # The mistake: to insist that each prompt begins with the tokens of the turn before.
    first, second = talk.sampler.sequences[0], talk.sampler.requests[1].prompt_ids
    assert list(second[: len(first)]) != first

    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.UNEXTENDABLE, Edge.UNEXTENDABLE]
    assert record.metrics["gateway/edges_unextendable"] == 2
    assert record.failure is None
    assert [branch_tokens(record.nodes, node) for node in record.nodes] == talk.sampler.sequences


class Garbler:
    """A sampler that loses the log-probabilities of one attempt."""

    def __init__(self):
        self.inner = ScriptedSampler(["fine"], tokenizer=TOKENIZER)

    async def sample(self, request):
        completion = await self.inner.sample(request)
        is_bad = request.session_id.startswith("g000000-1")
        return replace(completion, sampler_logprobs=b"") if is_bad else completion

    async def status(self):
        return await self.inner.status()


class BuggyGrader:
    """Meets a file that it was not written for."""

    async def grade(self, task, change):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a test printed this")


@pytest.mark.row("P-56")
async def test_one_bad_rollout_is_a_failure_with_a_name_and_no_more():
    """A bug, a garbled answer and a nonsensical request each end one rollout, as data; the group goes on."""
    records = []

    async def agent(chat):
        status, _ = await chat.ask(USER)
        # What no harness should send, but one did.
        await chat.ask({"role": "user", "content": {"no": "text"}}, {"role": "nobody"})
        return status != 200

    plan = GroupPlan(seed=0, size=4, min_survivors=2, retries=0)
    ticket = Ticket(number=0, task_id="t", admitted_version=0)

    # The mistake: whoever awaits all attempts at once has the first error of one for all.
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as attempts:
            attempts.create_task(BuggyGrader().grade(task(), {}))

    async with playing(agent, Garbler(), on_record=records.append) as player:
        played = await play_group(player, task(), ticket, plan, concurrency=asyncio.Semaphore(4))
    assert [one.index for one in played.group.trajectories] == [0, 2, 3]
    assert [(one.outcome, one.failure.reason) for one in played.unscored] == [
        (Outcome.INFRA_ERROR, "completion_logprobs_length")
    ]

    async with playing(agent, Garbler(), grader=BuggyGrader(), on_record=records.append) as player:
        played = await play_group(player, task(), ticket, plan, concurrency=asyncio.Semaphore(4))
    reasons = Counter(one.failure.reason for one in played.unscored)
    assert reasons == {"unexpected_error": 3, "completion_logprobs_length": 1}
    assert played.lost == "too_few_survivors"
    assert all(json.loads(encode_record(record)) for record in records)


class ThreeTokenOpening(ChatMLRenderer):
    """A family whose answers begin behind three tokens that are no role and no line break."""

    OPENING = (5, 6, 7)

    def _opening(self):
        return self.OPENING


@pytest.mark.row("P-58")
async def test_a_generation_prompt_may_have_any_number_of_tokens():
    """An answer begins behind the whole generation prompt, whether that is three tokens or eleven."""
    talk = Talk(["one", "two"], renderer=ThreeTokenOpening(TOKENIZER))
    await talk.go_on("and then")
    nodes = (await talk.session.close()).nodes

    # The mistake: to take the last token of the prompt alone for the generation prompt.
    assert all(node.prompt_ids[-2:-1] == ThreeTokenOpening.OPENING[1:2] for node in nodes)

    assert all(node.prompt_ids[-3:] == ThreeTokenOpening.OPENING for node in nodes)
    assert [node.completion.token_ids for node in nodes] == talk.sampler.drawn
    assert [branch_tokens(nodes, node) for node in nodes] == talk.sampler.sequences


CUT = 8
"""Tokens of the limit per turn that a careless trainer applies to the whole conversation."""


def rules_for(plan):
    ingest = IngestRules(vocab_size=plan.vocab_size, newest_version=plan.newest_version)
    return SampleRules(
        algorithm=AlgorithmSection(), ingest=ingest, group_size=plan.attempts, temperature=1.0, needs_support=False
    )


@pytest.mark.row("P-59")
@given(seed=st.integers(0, 300))
def test_every_captured_token_is_trained_or_reported(seed):
    """Tokens captured equal tokens trained plus tokens masked and dropped, by reason."""
    plan = SyntheticPlan()
    group = synthetic_group(plan, seed)
    held = replace(group.trajectories[0], outcome=Outcome.HELD, reward=None)
    group = replace(group, trajectories=(held, *group.trajectories[1:]))
    captured = sum(len(node.completion.token_ids) for trajectory in group.trajectories for node in trajectory.nodes)
    made = samples_of(group, rules_for(plan))

    # The mistake: a row is cut where one turn would have to end, and nobody counts.
    kept = sum(int(sample.trained[:CUT].sum()) for sample in made.samples)
    assert kept < captured

    account = made.account
    assert account.drawn == captured
    assert account.dropped["held"] > 0
    assert account.trained + sum(account.masked.values()) + sum(account.dropped.values()) == captured
    assert sum(int(sample.trained.sum()) for sample in made.samples) == account.trained


@pytest.mark.row("P-60")
async def test_how_an_answer_ended_is_said_with_every_turn():
    """No completion exists without its finish reason, and a cut answer cannot pass for a whole one."""
    whole = ScriptedSampler(["all of it"], tokenizer=TOKENIZER)
    talk = Talk([], drawing=whole, params=SamplingParams(max_tokens=3))
    answer = await talk.ask(USER)
    (node,) = (await talk.session.close()).nodes
    assert (answer.finish_reason, node.completion.finish_reason) == ("length", FinishReason.LENGTH)

    # The mistakes: an engine that leaves it out, and a client that fills in what is usual.
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(node.completion))
    del wire["finish_reason"]
    with pytest.raises(msgspec.ValidationError, match="finish_reason"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Completion)

    class Optimist(ScriptedSampler):
        async def sample(self, request):
            return replace(await super().sample(request), finish_reason=FinishReason.STOP)

    talk = Talk([], drawing=Optimist(["all of it"], tokenizer=TOKENIZER), params=SamplingParams(max_tokens=3))
    with pytest.raises(CallRefusedError):
        await talk.ask(USER)
    assert (await talk.session.close()).failure.reason == "completion_finish"


@pytest.mark.row("P-62")
async def test_a_harness_is_told_that_an_answer_was_cut(tmp_path):
    """The gateway says `length`, and the built-in harness then asks for a shorter answer, not for a forgotten tool."""
    submit = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
    told = {}
    for name, thought in (("whole", "I think."), ("cut", "<think>\n" + "hm " * 200)):
        gateway = Gateway(
            sampler=ScriptedSampler([thought, submit], tokenizer=TOKENIZER),
            renderer=ChatMLRenderer(TOKENIZER, "chatml-compact"),
            context_length=4000,
        )
        await gateway.start()
        spec = SessionSpec(
            session_id=name,
            purpose="train",
            seed=0,
            params=SamplingParams(max_tokens=100),
            max_calls=5,
            max_session_tokens=1000,
        )
        env = {"OPENAI_BASE_URL": f"http://127.0.0.1:{gateway.port}/v1", "OPENAI_API_KEY": await gateway.open(spec)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(MINI), "fix it"), cwd=tmp_path, env=os.environ | env, stdout=-1, stderr=-2
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        messages = (await gateway.close(name)).messages
        told[name] = messages[3]["content"]
        await gateway.stop()
    # The mistake would be one text for both.
    assert "Call a tool" in told["whole"]
    assert "cut off" in told["cut"]


@pytest.mark.row("P-63")
async def test_a_limit_per_call_and_a_limit_per_session_are_two_settings():
    """`sampling.max_tokens` bounds a call, `harness.max_session_tokens` a session; each says when it was met."""
    answers = ["a" * 30] * 9

    # The mistake: with one limit for both, nine calls that keep it draw nine times as much.
    talk = Talk(answers, params=SamplingParams(max_tokens=10))
    for turn in range(9):
        await talk.ask({"role": "user", "content": str(turn)})
    assert sum(map(len, talk.sampler.drawn)) == 90

    talk = Talk(answers, params=SamplingParams(max_tokens=10), max_session_tokens=24)
    said = [(await talk.ask({"role": "user", "content": str(turn)})).finish_reason for turn in range(3)]
    with pytest.raises(CallRefusedError, match="session_tokens"):
        await talk.ask({"role": "user", "content": "3"})
    record = await talk.session.close()
    assert [len(node.completion.token_ids) for node in record.nodes] == [10, 10, 4]
    assert said == ["length"] * 3
    assert record.truncated == "session_tokens"
