"""How old the weights were that tokens were drawn with."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.types import Group, Trajectory, VersionRun


def token_versions(runs: Sequence[VersionRun]) -> NDArray[np.int32]:
    """Return the policy version of each drawn token, i32[n]."""
    return np.repeat(
        np.array([run.version for run in runs], dtype=np.int32),
        np.array([run.count for run in runs], dtype=np.int64),
    )


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the lowest version that any token was drawn with; None when none was drawn."""
    runs = (run for trajectory in trajectories for node in trajectory.nodes for run in node.completion.versions)
    return min((run.version for run in runs if run.count), default=None)


def newest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the highest version that any token was drawn with; None when none was drawn."""
    runs = (run for trajectory in trajectories for node in trajectory.nodes for run in node.completion.versions)
    return max((run.version for run in runs if run.count), default=None)


def group_staleness(group: Group, version: int) -> int:
    """Return the versions between the group's oldest token and `version`, which it is trained into; waiting counts."""
    oldest = oldest_version(group.trajectories)
    return 0 if oldest is None else version - oldest
