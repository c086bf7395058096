# pyright: basic
"""Attempts many times longer than the model's context, as chains of conversations that one reward trains."""

import asyncio
import json

import pytest
from run_kit import gone, start

from etude.cli.main import main
from etude.store.groups import decode_group
from etude.types import Edge

pytestmark = pytest.mark.slow

CONTEXT = 512
NUM_PAGES = 16

PAGER = """
import json, os, sys, urllib.request

PAGE = " ".join("def f%d(x): return x" % number for number in range(26))
TRIGGER = int(os.environ["ETUDE_COMPACTION_TRIGGER_TOKENS"])

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    reply = json.load(urllib.request.urlopen(request))
    return reply["choices"][0]["message"]["content"] or "", reply["usage"]["total_tokens"]

def user(text):
    return {"role": "user", "content": text}

talk = [user(sys.argv[1])]
for number in range(PAGES):
    talk.append(user(PAGE) if number else user("Begin.\\n" + PAGE))
    answer, used = ask(talk)
    talk.append({"role": "assistant", "content": answer})
    if used >= TRIGGER:
        summary, _ = ask([*talk, user("Sum up.")])
        talk = [user(sys.argv[1] + "You wrote down:\\n" + summary)]
open("answer.txt", "w").write(summary)
"""
"""An agent that reads pages whatever the policy says, and goes on from the policy's summaries."""


@pytest.fixture(scope="module")
def compacted(coin, tmp_path_factory):
    """The directory of a run whose policy can only see two pages at once."""
    root = tmp_path_factory.mktemp("compacted")
    (root / "harness").mkdir()
    (root / "harness/pager.py").write_text(PAGER.replace("PAGES", str(NUM_PAGES)))
    recipe = root / "recipe.toml"
    recipe.write_text(coin.read_text().replace("once.py", "pager.py"))
    settings = (
        f"harness.files={root}/harness",
        "harness.compaction.trigger_tokens=280",
        "harness.max_calls=40",
        "sampling.max_tokens=8",
        "trainer.steps=2",
        "rollout.group_size=2",
        'stages=["train"]',
    )

    async def play():
        command = await start("run", recipe, root / "run", *settings)
        assert await command.end() == 0, command.errors
        await gone(root / "run")

    asyncio.run(play())
    return root / "run"


@pytest.fixture(scope="module")
def chains(compacted):
    files = sorted(compacted.glob("groups/*/*.parquet"))
    return [chain for path in files for chain in decode_group(path.read_bytes()).trajectories]


def test_each_attempt_is_a_chain_of_conversations_that_fit_the_context(chains):
    assert len(chains) >= 8
    for chain in chains:
        begun = [node.edge for node in chain.nodes if node.parent is None]
        assert begun[0] is Edge.ROOT
        assert len(begun) >= NUM_PAGES // 2
        # What an untrained policy writes down may be too little to be recognised again.
        assert set(begun[1:]) <= {Edge.COMPACTION, Edge.REWRITE}
        lengths = {}
        for node in chain.nodes:
            before = 0 if node.parent is None else lengths[node.parent]
            lengths[node.node_id] = before + len(node.prompt_ids) + len(node.completion.token_ids)
        assert max(lengths.values()) <= CONTEXT
    recognised = sum(any(node.edge is Edge.COMPACTION for node in chain.nodes) for chain in chains)
    assert recognised >= 0.9 * len(chains)


def test_what_an_attempt_reads_is_eight_contexts_long(chains):
    for chain in chains:
        assert sum(len(node.prompt_ids) for node in chain.nodes) >= 8 * CONTEXT


def test_every_drawn_token_of_a_chain_is_accounted_for_and_trained_once(compacted, chains, capsys):
    assert main(["verify", str(compacted), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["state"] == "sealed"
    tokens = said["totals"]["tokens"]
    drawn = tokens.pop("drawn")
    assert sum(tokens.values()) == drawn
    assert tokens["trained"] > 0
    rows = [json.loads(line) for line in (compacted / "metrics.jsonl").read_text().splitlines()]
    trained = sum(row["tokens/trained"] for row in rows if row["stage"] == "train")
    assert trained == tokens["trained"]
    assert trained <= sum(len(node.completion.token_ids) for chain in chains for node in chain.nodes)
