"""The training traces of a run's rollouts, made from the files of its groups."""

import tomllib
from typing import cast

from etude.algorithm.trace import TrainingTrace, training_trace
from etude.algorithm.trees import tree_problem
from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.store.groups import MAX_FILE_BYTES, decode_group

_MAX_CONFIG_BYTES = 16 << 20


async def load_traces(store: ObjectStore, names: list[str]) -> list[TrainingTrace]:
    """Return the traces of rollouts of one group, which are called as `rollout_names` calls them.

    Raises:
        StoreError: The group's file is missing or damaged, or has none of them. Only groups that were finished for
            training have files: the tokens of evaluations, of lost groups and of replaced attempts are not kept.
    """
    group = names[0].partition("/")[0]
    keys = [key for key in await store.list("groups") if key.endswith(f"/{group}.parquet")]
    if not keys:
        msg = f"group {group} has no file under groups/: tokens are kept of groups that were finished for training only"
        raise StoreError(msg)
    # A group that was given up with its version is trained again, into the greatest one.
    key = max(keys, key=lambda key: int(key.split("/")[1]))
    try:
        decoded = decode_group(await store.get(key, max_bytes=MAX_FILE_BYTES))
    except IntegrityError as error:
        msg = f"{key}: {error}"
        raise StoreError(msg) from error
    for one in decoded.trajectories:
        if problem := tree_problem(one.nodes):
            msg = f"{key}: rollout {one.rollout_id} is no tree ({problem})"
            raise StoreError(msg)
    found = {f"{group}/{one.rollout_id.removeprefix(f'{group}-')}": one for one in decoded.trajectories}
    wanted = [found[name] for name in names if name in found]
    if not wanted:
        msg = f"rollout {names[0]} is not in {key}: another attempt took its place"
        raise StoreError(msg)
    sampling = await _sampling(store)
    return [training_trace(one.nodes, sampling=sampling) for one in wanted]


async def _sampling(store: ObjectStore) -> dict[str, object]:
    try:
        config = tomllib.loads((await store.get("run.toml", max_bytes=_MAX_CONFIG_BYTES)).decode())
    except (ObjectMissingError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}
    section = config.get("sampling")
    known = cast("dict[str, object]", section) if isinstance(section, dict) else {}
    return {name: known[name] for name in ("temperature", "top_p", "top_k") if name in known}
