# pyright: basic, reportArgumentType=false
"""What a sampler says it drew can be recomputed from what the gateway captured, whatever the harness does."""

import asyncio
import random
from collections import Counter

import msgspec
import pytest

from etude.gateway.conversation import Conversation
from etude.gateway.doubles import byte_tokenizer
from etude.gateway.renderers.chatml import ChatMLRenderer
from etude.gateway.sessions import ModelCall, Session
from etude.interfaces import SessionSpec
from etude.policy.files import random_policy
from etude.policy.shape import PolicyShape
from etude.sampling.decode_loop import Held
from etude.sampling.doubles import FakeEngine
from etude.sampling.engines.torch_engine import TorchEngine
from etude.sampling.sampler import EngineSampler
from etude.store.groups import decode_group, encode_group
from etude.telemetry.digests import of_drawn, of_ids
from etude.telemetry.doubles import MemoryLedger
from etude.telemetry.events import Drawn
from etude.types import Edge, Group, Outcome, SamplingParams, Trajectory

TOKENIZER = byte_tokenizer()
SHAPE = PolicyShape(
    model_type="qwen3_moe",
    vocab_size=TOKENIZER.get_vocab_size(),
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_hidden=0,
    qk_norm=True,
    experts=4,
    experts_per_token=2,
    expert_hidden=8,
    norm_topk=True,
    max_context=1024,
)


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    tensors: dict
    lineage: str = "l"
    digest: str = "d"


def torch_engine():
    return TorchEngine(SHAPE, random_policy(SHAPE, 0).hf_tensors(), max_batch=4)


def fake_engine():
    return FakeEngine(vocab=TOKENIZER.get_vocab_size())


async def capture(engine, seed):
    """Let a harness go on, go back, ask again and start over, with a swap halfway; return facts and record."""
    ledger, moves = MemoryLedger(), random.Random(seed)
    held = Held(lineage="l", version=0, digest="d")
    spec = SessionSpec(
        session_id="g0-0-abcd",
        purpose="train",
        seed=seed,
        params=SamplingParams(max_tokens=12),
        max_calls=100,
        max_session_tokens=10_000,
    )
    async with EngineSampler(engine, sampler_id="s", pool="p", view="fp32", held=held, ledger=ledger) as sampler:
        renderer = ChatMLRenderer(TOKENIZER, "chatml-compact")
        session = Session(spec, sampler=sampler, renderer=renderer, context_length=1024, call_timeout_s=30.0)
        ended = []

        async def ask(messages):
            call = ModelCall(conversation=Conversation(messages=tuple(messages), tools=()), body_key=repr(messages))
            ended.append([*messages, dict((await session.submit(call)).message)])

        await ask([{"role": "user", "content": "start"}])
        for step in range(10):
            if step == 5:
                await sampler.stage(Weights(version=1, tensors=random_policy(SHAPE, 1).hf_tensors()))
            tail = {"role": "user", "content": f"go {step}"}
            known = moves.choice(ended)
            both = [[*known, tail], known[:-1]] if step % 3 else [[*ended[-1], tail], [tail]]
            await asyncio.gather(*map(ask, both))
        return [fact for fact in ledger.events if isinstance(fact, Drawn)], await session.close()


def witnessed(nodes):
    """Return what a reader of the tree makes of each call."""
    sequences, found = {None: ()}, []
    for node in nodes:
        prompt = (*sequences[node.parent], *node.prompt_ids)
        sequences[node.node_id] = (*prompt, *node.completion.token_ids)
        versions = tuple((run.version, run.count) for run in node.completion.versions)
        found.append((len(prompt), of_ids(prompt), of_drawn(node.completion), versions))
    return Counter(found)


@pytest.mark.parametrize("engine", [fake_engine, torch_engine])
async def test_the_tree_of_a_session_holds_exactly_what_the_sampler_says_it_drew(engine):
    facts, record = await capture(engine(), seed=3)
    assert {node.edge for node in record.nodes} >= {Edge.ROOT, Edge.CONTINUATION, Edge.RETRY, Edge.REWRITE}
    assert {version for fact in facts for version, _ in fact.versions} == {0, 1}
    assert sorted(fact.request for fact in facts) == sorted(f"g0-0-abcd/{call}" for call in range(21))
    told = Counter((fact.prompt, fact.prompt_digest, fact.digest, fact.versions) for fact in facts)
    assert witnessed(record.nodes) == told
    trajectory = Trajectory(
        rollout_id="g0-0", group_id="g0", task_id="t", index=0, outcome=Outcome.SCORED, reward=1.0, nodes=record.nodes
    )
    group = Group(group_id="g0", task_id="t", ticket=0, admitted_version=0, trajectories=(trajectory,))
    [stored] = decode_group(encode_group(group, [0.0])).trajectories
    assert witnessed(stored.nodes) == told
