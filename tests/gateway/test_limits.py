# pyright: basic, reportOptionalMemberAccess=false
"""What a session may spend, and what a harness is told when it has spent it."""

from etude.gateway.limits import Limits
from etude.interfaces import SessionSpec
from etude.types import SamplingParams

USER = {"role": "user", "content": "fix it"}


async def test_the_deadline_ends_a_call_in_flight_and_refuses_all_later_ones(serve, gated):
    async with serve([], sampler=gated("a"), deadline_s=0.1) as served:
        status, body = await served.ask(USER)
        assert (status, body["error"]["code"]) == (404, "session_limit_reached")
        assert "deadline" in body["error"]["message"]
        assert (await served.ask(USER))[0] == 404
        record = await served.close()
    assert (record.truncated, record.failure, record.nodes) == ("deadline", None, ())


async def test_a_limit_may_be_an_ordinary_answer_that_is_in_no_tree(serve):
    async with serve(["a"], max_calls=1, on_limit="message") as served:
        _, first = await served.ask(USER)
        status, last = await served.ask(USER, first["choices"][0]["message"], USER)
        record = await served.close()
    assert (status, last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == (200, "stop", 0)
    assert "its calls" in last["choices"][0]["message"]["content"]
    assert (record.truncated, record.num_calls, len(record.nodes)) == ("calls", 1, 1)


async def test_a_session_that_has_time_left_is_not_ended_by_a_slow_sampler(serve, gated):
    async with serve([], sampler=gated("a"), deadline_s=60.0, call_timeout_s=0.05) as served:
        status, _ = await served.ask(USER)
        record = await served.close()
    assert (status, record.failure.reason) == (503, "timeout")


def test_calls_at_the_same_time_do_not_exceed_the_tokens_together():
    now = [0.0]
    spec = SessionSpec(
        session_id="s", purpose="train", seed=0, params=SamplingParams(), max_calls=9, max_session_tokens=100
    )
    limits = Limits(spec, now=lambda: now[0])
    limits.reserve(limits.tokens_left() - 30)
    assert limits.tokens_left() == 30
    limits.give_back(70 - 5)
    assert limits.tokens_left() == 95
    assert limits.seconds_left == float("inf")
