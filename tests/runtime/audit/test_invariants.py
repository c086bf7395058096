# pyright: basic
"""Each invariant notices a ledger, or a file, that breaks it."""

import asyncio
import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest
import zstandard

from etude.runtime.audit.audit import INVARIANTS, examine, judge, take_snapshot
from etude.runtime.audit.doubles import write_run
from etude.runtime.audit.facts import Facts
from etude.runtime.audit.intake import load_ledger
from etude.store.groups import decode_advantages, decode_group, encode_group
from etude.store.local import FileStore
from etude.types import Edge, Outcome

SECOND = "(SELECT w FROM writer WHERE name LIKE 'controller-%4')"
GROUP = "groups/0/g000001.parquet"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished") / "run"
    directory.mkdir()
    asyncio.run(write_run(directory))
    return directory


def findings_of(directory, database, *changes, quick=True):
    """Audit a run whose ledgers said something else."""

    async def work():
        store = FileStore(directory)
        facts = Facts(database)
        await load_ledger(store, facts)
        for change in changes:
            assert facts.sql.execute(change).rowcount > 0, f"{change} changes nothing"
        keys = await store.list("")
        case = await examine(store, facts, await take_snapshot(store), keys, quick=quick)
        try:
            return {finding.name: finding for finding in judge(case)}
        finally:
            facts.close()

    return asyncio.run(work())


LIES = [
    ("ledger_intact", "UPDATE mark SET chain = 'f00d'"),
    ("ledger_intact", "UPDATE service_ended SET events = events + 1"),
    ("ledger_intact", "UPDATE opened SET after_events = after_events + 1 WHERE after <> ''"),
    ("ledger_intact", "UPDATE service_ended SET events = events - 1"),
    ("controllers_form_a_chain", "UPDATE opened SET after = '' WHERE service = 'controller'"),
    ("controllers_form_a_chain", "UPDATE opened SET n = 1 WHERE service = 'trainer'"),
    ("controllers_form_a_chain", "DELETE FROM opened WHERE service = 'trainer'"),
    ("writers_known", "UPDATE service_ended SET writer = 'trainer-99999999'"),
    ("writers_known", "UPDATE writer SET name = 'local-1-99999999' WHERE name LIKE 'local-0-%6'"),
    ("tasks_in_order", "UPDATE admitted SET task = 'task-0'"),
    ("tasks_in_order", "UPDATE admitted SET n = -n"),
    ("tasks_once", "DELETE FROM admitted WHERE ticket = 2"),
    ("tasks_once", f"INSERT INTO group_lost(w, n, t, ticket, reason) VALUES({SECOND}, 30, 0, 0, '?')"),
    ("tasks_once", "UPDATE group_lost SET reason = ''"),
    ("tasks_once", "UPDATE resumed SET restarted = '[0]'"),
    ("groups_once", "UPDATE group_taken SET ticket = 0 WHERE ticket = 3"),
    ("groups_once", "DELETE FROM group_taken WHERE ticket = 3"),
    ("groups_once", "UPDATE group_taken SET n = -n WHERE ticket = 1"),
    ("groups_once", "UPDATE group_taken SET version = 0"),
    ("groups_once", "DELETE FROM trained WHERE version = 2"),
    ("groups_once", "DELETE FROM version_made WHERE version = 2"),
    ("groups_once", "UPDATE trained SET step = 7"),
    ("groups_once", "UPDATE trained SET groups = replace(groups, 'g000001', 'g000002')"),
    ("groups_once", "UPDATE resumed SET returned = '[0]'"),
    ("groups_are_what_was_recorded", "UPDATE admitted SET task = 'another' WHERE ticket = 1"),
    ("groups_are_what_was_recorded", "UPDATE rollout_ended SET reward = 0.5"),
    ("groups_are_what_was_recorded", "UPDATE rollout_ended SET outcome = 'held'"),
    ("groups_are_what_was_recorded", "UPDATE group_ready SET rollouts = '[]' WHERE ticket = 0"),
    ("rollouts_say_what_happened", "UPDATE rollout_ended SET reward = 0.5 WHERE rollout LIKE 'eval%'"),
    ("rollouts_say_what_happened", "UPDATE rollout_started SET purpose = 'probe'"),
    ("tokens_conserved", "UPDATE rollout_ended SET drawn = drawn + 99 WHERE rollout LIKE 'eval%'"),
    ("tokens_conserved", "DELETE FROM rollout_started WHERE rollout LIKE 'eval%'"),
    ("tokens_conserved", "UPDATE trained SET groups = replace(groups, ':1}', ':2}')"),
    ("tokens_conserved", "UPDATE group_ready SET drawn = drawn + 1"),
    ("tokens_are_those_drawn", "UPDATE drawn SET digest = 'f00d'"),
    ("tokens_are_those_drawn", "UPDATE drawn SET prompt_digest = 'f00d' WHERE request LIKE 'g000001%'"),
    ("tokens_are_those_drawn", "UPDATE drawn SET lineage = 'other'"),
    ("tokens_are_those_drawn", "UPDATE drawn SET request = 'eval-' || request"),
    ("trees_are_sound", """UPDATE trained SET groups = replace(groups, '"trained":', '"trained":9')"""),
    ("trees_are_sound", """UPDATE trained SET groups = replace(groups, '"masked":{', '"masked":{"more":99,')"""),
    (
        "trees_are_sound",
        """UPDATE trained SET groups = replace(groups, '"dropped":{', '"dropped":{"auxiliary":9')""",
    ),
    ("trees_are_sound", """UPDATE rollout_ended SET edges = '{"root":2}'"""),
    ("versions_grow_by_one", "UPDATE published SET version = 3 WHERE version = 2"),
    ("versions_grow_by_one", "DELETE FROM trained"),
    ("versions_grow_by_one", "DELETE FROM lineage_opened"),
    ("versions_grow_by_one", "UPDATE lineage_opened SET version = 1"),
    (
        "versions_grow_by_one",
        "UPDATE published SET digest = 'f00d' WHERE w = (SELECT max(w) FROM published) AND version = 1",
    ),
    ("versions_are_intact", "UPDATE published SET digest = 'f00d'"),
    ("versions_are_intact", "UPDATE published SET lineage = 'other' WHERE version = 1"),
    ("replicas_hold_what_was_published", "UPDATE applied SET digest = 'f00d'"),
    ("replicas_hold_what_was_published", "UPDATE applied SET held = n"),
    ("replicas_hold_what_was_published", "UPDATE applied SET n = -n"),
    ("replicas_hold_what_was_published", "UPDATE applied SET lineage = 'other'"),
    ("samplers_draw_what_they_hold", "DELETE FROM applied"),
    ("samplers_draw_what_they_hold", "UPDATE applied SET n = n + 50"),
    ("samplers_draw_what_they_hold", "UPDATE drawn SET tokens = tokens + 1"),
    ("sandboxes_accounted", "DELETE FROM sandbox_destroyed WHERE sandbox LIKE '%eval%'"),
    ("sandboxes_accounted", "DELETE FROM sandbox_created WHERE sandbox LIKE '%eval%'"),
    ("sandboxes_accounted", "UPDATE sandbox_destroyed SET sandbox = 'box-g000000-0-00000000'"),
    ("files_are_those_claimed", "UPDATE rollout_ended SET digest = 'f00d'"),
    ("files_are_those_claimed", 'UPDATE checkpoint_written SET files = \'{"checkpoints/000001/gone": "f00d"}\''),
    ("files_are_those_claimed", 'UPDATE stage_ended SET files = \'{"policy/sft/gone": "f00d"}\''),
    ("files_are_those_claimed", "UPDATE sealed SET files = '{}'"),
    ("summary_follows_from_facts", "UPDATE stage_ended SET seconds = 99"),
    ("summary_follows_from_facts", "UPDATE eval_ended SET pass_rate = 0.99"),
    ("summary_follows_from_facts", "DELETE FROM eval_ended"),
]


@pytest.mark.parametrize(("invariant", "lie"), LIES, ids=[f"{name}: {lie}"[:90] for name, lie in LIES])
def test_an_invariant_notices_facts_that_break_it(finished, tmp_path, invariant, lie):
    finding = findings_of(finished, tmp_path / "facts", lie)[invariant]
    assert finding.violations > 0
    assert finding.first


def test_clocks_that_jump_backwards_break_nothing(finished, tmp_path):
    lies = [f"UPDATE {kind} SET t = -1e9 * n" for kind in ("opened", "admitted", "drawn", "trained", "group_ready")]
    found = findings_of(finished, tmp_path / "facts", *lies)
    assert [finding.first for finding in found.values() if finding.violations] == []


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    return directory


def rewrite(directory, change, advantages=None) -> str:
    """Replace a group's file, and return the lie by which the ledger claims the new one."""
    path = directory / GROUP
    data = path.read_bytes()
    group = change(decode_group(data))
    path.write_bytes(encode_group(group, advantages or decode_advantages(data)))
    return f"UPDATE group_ready SET digest = '{hashlib.sha256(path.read_bytes()).hexdigest()}' WHERE key = '{GROUP}'"


def with_first_node(group, change):
    first, *others = group.trajectories
    nodes = (change(first.nodes[0]), *first.nodes[1:])
    return msgspec.structs.replace(group, trajectories=(msgspec.structs.replace(first, nodes=nodes), *others))


def another_prompt(node):
    return msgspec.structs.replace(node, prompt_ids=(9, *node.prompt_ids[1:]))


def another_token(node):
    ids = node.completion.token_ids
    return msgspec.structs.replace(
        node, completion=msgspec.structs.replace(node.completion, token_ids=(ids[0] + 1, *ids[1:]))
    )


def another_logprob(node):
    changed = b"\0\0\x80\xbf" + node.completion.sampler_logprobs[4:]
    return msgspec.structs.replace(node, completion=msgspec.structs.replace(node.completion, sampler_logprobs=changed))


def another_version(node):
    runs = tuple(msgspec.structs.replace(run, version=run.version + 1) for run in node.completion.versions)
    return msgspec.structs.replace(node, completion=msgspec.structs.replace(node.completion, versions=runs))


@pytest.mark.parametrize("change", [another_prompt, another_token, another_logprob, another_version])
def test_a_trained_call_that_differs_in_anything_from_what_was_drawn_is_found(copy, tmp_path, change):
    lie = rewrite(copy, lambda group: with_first_node(group, change))
    assert findings_of(copy, tmp_path / "facts", lie)["tokens_are_those_drawn"].violations > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"edge": Edge.AUXILIARY}, "that may be trained on"),
        ({"edge": Edge.CONTINUATION}, "call 0, continuation: it extends no call"),
        ({"edge": Edge.SUBAGENT_RETURN}, "call 0, subagent_return: it extends no call"),
        ({"edge": Edge.RETRY, "link": 1}, "call 0, retry: its prompt is not that of call 1"),
    ],
)
def test_a_call_that_hangs_where_its_edge_does_not_allow_is_found(copy, tmp_path, changes, problem):
    lie = rewrite(copy, lambda group: with_first_node(group, lambda node: msgspec.structs.replace(node, **changes)))
    finding = findings_of(copy, tmp_path / "facts", lie)["trees_are_sound"]
    assert problem in " ".join(finding.first)


def test_a_link_to_a_call_that_there_is_not_is_found(copy, tmp_path):
    lie = rewrite(copy, lambda group: with_first_node(group, lambda node: msgspec.structs.replace(node, link=9)))
    finding = findings_of(copy, tmp_path / "facts", lie)["groups_are_what_was_recorded"]
    assert "is no tree (link_unknown)" in finding.first[0]


def test_a_token_of_a_version_that_was_not_made_yet_is_found(copy, tmp_path):
    lie = rewrite(copy, lambda group: with_first_node(group, another_version))
    assert findings_of(copy, tmp_path / "facts", lie)["staleness_bounded"].violations == 1


def test_advantages_that_do_not_follow_from_rewards_are_found(copy, tmp_path):
    lie = rewrite(copy, lambda group: group, advantages=(0.25, -0.5))
    assert findings_of(copy, tmp_path / "facts", lie)["advantages_follow_from_rewards"].violations == 1


def test_a_failure_that_was_scored_is_found(copy, tmp_path):
    def scored(group):
        first, *others = group.trajectories
        failed = msgspec.structs.replace(first, outcome=Outcome.INFRA_ERROR)
        return msgspec.structs.replace(group, trajectories=(failed, *others))

    assert findings_of(copy, tmp_path / "facts", rewrite(copy, scored))["groups_are_what_was_recorded"].violations == 1


def test_a_group_older_than_allowed_is_found(copy, tmp_path):
    text = (copy / "run.toml").read_text()
    assert "max_staleness = 1" in text
    (copy / "run.toml").write_text(text.replace("max_staleness = 1", "max_staleness = 0"))
    lies = [
        "UPDATE group_taken SET ticket = 4 - ticket WHERE ticket IN (1, 3)",
        "UPDATE trained SET groups = replace(groups, 'g000001', 'g000003') WHERE version = 1",
    ]
    assert findings_of(copy, tmp_path / "facts", *lies)["staleness_bounded"].violations > 0


def test_a_damaged_object_breaks_every_version_that_is_built_on_it(copy, tmp_path):
    manifest = zstandard.decompress(next(copy.glob("weights/*/manifests/0-*.json.zst")).read_bytes())
    (anchor,) = {piece["object"] for piece in msgspec.json.decode(manifest)["pieces"]}
    path = next(copy.glob(f"weights/*/objects/{anchor}"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    finding = findings_of(copy, tmp_path / "facts", "UPDATE writer SET torn = 0", quick=False)["versions_are_intact"]
    assert finding.violations == 2
    assert anchor in finding.first[0]


def test_every_invariant_has_a_lie_that_it_notices():
    others = {"advantages_follow_from_rewards", "staleness_bounded"}
    assert {name for name, _ in LIES} | others == {invariant.name for invariant in INVARIANTS}
