"""Reading the reward that a task's tests left, as Harbor defines it."""

import math

import msgspec

from etude.interfaces import Grade

MAX_REWARD_BYTES = 64 << 10


def read_verdict(files: dict[str, bytes]) -> Grade:
    """Return the reward in `reward.json`, else in `reward.txt`; `files` is /logs/verifier by name.

    `reward.json` is an object of finite numbers. The reward is its value `reward`, else the mean of all values. It must
    lie between 0 and 1: what is outside says that the tests, or whoever wrote the file, meant something else.
    """
    if "reward.json" in files:
        return _from_json(files["reward.json"])
    if "reward.txt" in files:
        return _from_text(files["reward.txt"])
    return Grade(reward=None, failure="no_reward: the tests left neither reward.json nor reward.txt in /logs/verifier")


def _from_json(content: bytes) -> Grade:
    try:
        components = msgspec.json.decode(content, type=dict[str, float])
    except msgspec.DecodeError as error:
        return _bad(f"reward.json is not an object of numbers: {error}")
    if not components:
        return _bad("reward.json is empty")
    mean = sum(components.values()) / len(components)
    return _checked(components.get("reward", mean), components)


def _from_text(content: bytes) -> Grade:
    try:
        value = float(content.decode("ascii"))
    except ValueError:
        return _bad("reward.txt is not a number")
    return _checked(value, {})


def _checked(value: float, components: dict[str, float]) -> Grade:
    if not all(map(math.isfinite, (value, *components.values()))):
        return _bad("a value is not finite")
    if not 0.0 <= value <= 1.0:
        return _bad(f"the reward {value} is not between 0 and 1")
    return Grade(reward=value, components=components)


def _bad(reason: str) -> Grade:
    return Grade(reward=None, failure=f"bad_reward: {reason}")
