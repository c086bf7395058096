# pyright: basic, reportOptionalMemberAccess=false
"""What the mini harness does with a model's answers."""

import pytest
from mini_kit import SUBMIT, gateway, play, results, run, shell

from etude.errors import SamplerError
from etude.types import Edge


async def test_it_works_through_the_shell_until_it_submits(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    answers = [shell("cat a.py"), shell("sed -i s/1/2/ a.py"), "I am done. " + SUBMIT]
    code, transcript, record = await play(answers, tmp_path)
    assert code == 0, transcript
    assert (tmp_path / "a.py").read_text() == "x = 2\n"
    assert results(record) == ["x = 1\n", "(no output)"]
    assert [node.edge for node in record.nodes] == [Edge.ROOT, Edge.CONTINUATION, Edge.CONTINUATION]
    assert "Fix the module." in transcript
    assert "x = 1" in transcript
    assert "submit" in transcript


async def test_the_same_answers_give_the_same_transcript(tmp_path):
    first = await play([shell("echo hi; false"), SUBMIT], tmp_path)
    second = await play([shell("echo hi; false"), SUBMIT], tmp_path)
    assert first[1] == second[1]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("printf out; exit 3", "out\n[exit 3]"),
        ("exit 3", "[exit 3]"),
        ("echo out; echo err >&2", "out\nerr\n"),
        ("kill -9 $$", "[exit -9]"),
        ("printf '\\377'", "\ufffd"),
        ("cat", "(no output)"),
        ("env | grep -c OPENAI", "0\n[exit 1]"),
        ("sleep 60 & echo started", "started\n"),
        ("echo a; sleep 60", "a\n[killed after 1 s]"),
        ("head -c 300000 /dev/zero | tr '\\0' x", "x" * 50 + "\n[299900 bytes left out]\n" + "x" * 50),
    ],
)
async def test_the_model_is_told_what_a_command_printed_and_how_it_ended(tmp_path, command, told):
    options = ("--timeout", "1", "--max-output", "100")
    code, _, record = await play([shell(command), SUBMIT], tmp_path, *options)
    assert (code, results(record)) == (0, [told])


async def test_tools_that_do_not_exist_and_bad_arguments_are_answered(tmp_path):
    wrong = '<tool_call>{"name": "edit", "arguments": {}}</tool_call>'
    wrong += '<tool_call>{"name": "shell", "arguments": {"cmd": "ls"}}</tool_call>' + shell("a\0b")
    code, _, record = await play([wrong, SUBMIT], tmp_path)
    bad = 'arguments must be {"command": "..."}'
    assert (code, results(record)) == (0, ["there is no tool edit", bad, bad])


async def test_a_plain_answer_is_reminded_once(tmp_path):
    assert (await play(["I think.", SUBMIT], tmp_path))[0] == 0
    assert (await play(["I think.", "Still.", SUBMIT], tmp_path))[0] == 6


async def test_it_stops_when_its_turns_are_used_up(tmp_path):
    assert (await play([shell("true")] * 3, tmp_path, "--max-turns", "2"))[0] == 5


async def test_a_limit_of_the_session_stops_it_at_once(tmp_path):
    code, transcript, record = await play([shell("true")] * 3, tmp_path, max_calls=2)
    assert (code, record.truncated) == (3, "calls")
    assert "session_limit_reached" in transcript


async def test_it_tries_again_while_the_sampler_is_away(tmp_path):
    code, _, record = await play([SamplerError("away"), SUBMIT], tmp_path)
    assert (code, record.failure, len(record.nodes)) == (0, None, 1)


async def test_a_wrong_key_is_permanent(tmp_path):
    async with gateway([SUBMIT]) as (_, url, _key):
        assert (await run("x", cwd=tmp_path, url=url, key="wrong"))[0] == 3


async def test_the_instruction_may_be_in_a_file_or_look_like_an_option(tmp_path):
    (tmp_path / "task.md").write_text("Read me.\n")
    for arguments, expected in ((("--file", "task.md"), "Read me.\n"), (("--verbose",), "--verbose")):
        async with gateway([SUBMIT]) as (served, url, key):
            assert (await run(*arguments, cwd=tmp_path, url=url, key=key))[0] == 0
            assert (await served.close("s")).messages[1]["content"] == expected


@pytest.mark.parametrize(
    "arguments", [(), ("",), ("--file", "missing.md"), ("--max-turns", "x", "go"), ("--colour", "red", "go")]
)
async def test_wrong_arguments_are_explained(tmp_path, arguments):
    code, transcript = await run(*arguments, cwd=tmp_path)
    assert code == 2
    assert transcript.startswith("[end] ")


async def test_a_base_url_that_is_not_plain_http_is_explained(tmp_path):
    code, transcript = await run("go", cwd=tmp_path, url="https://example.org/v1")
    assert code == 2
    assert "OPENAI_BASE_URL" in transcript
