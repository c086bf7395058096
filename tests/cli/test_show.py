# pyright: basic
"""`etude show`, on a run that is there."""

import asyncio
import json

import msgspec
import pytest
from click.testing import CliRunner

from etude.algorithm.trace import TrainingTrace
from etude.cli.main import cli
from etude.rollout.atif import Document
from etude.runtime.audit.doubles import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    asyncio.run(write_run(directory))
    return str(directory)


def show(*arguments):
    return CliRunner().invoke(cli, ["show", *arguments])


def test_a_rollout_is_told_as_a_tree_and_turn_by_turn(run):
    shown = show(run, "g000000/0")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith("g000000/0  task task-")
    tree = lines.index("2 calls")
    assert lines[tree + 1].startswith("└── 0 root  3 in, ")
    assert lines[tree + 2].startswith("    └── 1 continuation  2 in, ")
    assert "--- 1  user" in lines


def test_a_rollout_for_machines_is_its_document_with_the_tree(run):
    document = msgspec.json.decode(show(run, "g000000/0", "--json").output, type=Document)
    assert [(call.node, call.parent, call.edge) for call in document.extra.etude.calls] == [
        (0, None, "root"),
        (1, 0, "continuation"),
    ]


def test_a_trace_has_each_token_that_the_document_counts(run):
    document = json.loads(show(run, "g000000/0", "--json").output)
    shown = show(run, "g000000/0", "--trace")
    trace = msgspec.json.decode(shown.output, type=TrainingTrace)
    assert sum(sum(turn.loss_mask) for turn in trace.turns) == document["final_metrics"]["total_completion_tokens"]
    assert trace.turns[0].metadata["sampling"] == {"temperature": 1.0, "top_p": 0.97, "top_k": 64}


def test_the_traces_of_a_group_are_one_line_each(run):
    shown = show(run, "g000000", "--trace")
    assert [len(msgspec.json.decode(line, type=TrainingTrace).turns) for line in shown.output.splitlines()] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--trace"], "needs a ROLLOUT"), (["eval-v2-task-9/0", "--trace"], "finished for training only")],
)
def test_a_trace_that_there_is_not_is_refused_with_the_reason(run, arguments, message):
    shown = show(run, *arguments)
    assert shown.exit_code != 0
    assert message in shown.output + str(shown.exception)
