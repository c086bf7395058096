"""The cheapest way from what a reader holds to a version: differences, differences that skip, or an anchor."""

from collections.abc import Collection, Sequence

from etude.errors import IntegrityError
from etude.weight_types import Route

MAX_ROUTES = 1 << 17
"""Of one lineage: a run of 100,000 versions that deletes nothing. What claims more is refused unread."""
MAX_PATH = 1024
"""Routes one after the other: more than differences that skip ever leave, and what a reader has in memory at once."""
REQUEST_BYTES = 1 << 16
"""What one more request costs, in bytes that could be read meanwhile: 5 ms at 100 Mbit/s."""
_MAX_BYTES = 1 << 50


def cheapest(
    routes: Collection[Route], *, version: int, held: int | None = None, request_bytes: int = REQUEST_BYTES
) -> Sequence[Route]:
    """Return the routes to take one after the other from the version `held`, or from nothing, to `version`.

    Of all ways that has the least sum of bytes and `request_bytes` per route; of equal ones the one with the fewest
    routes. Empty when the version is held. An anchor needs nothing, so it may follow on what is held as well.

    Raises:
        IntegrityError: There is no way, or the routes are not what a publisher writes.
    """
    _check(routes)
    if held == version:
        return ()
    # A route leads to a newer version, so in order of the versions each is final before it is left: no queue is needed.
    best: dict[int, tuple[int, int, Route | None]] = {} if held is None else {held: (0, 0, None)}
    for route in sorted(routes, key=lambda route: (route.version, -1 if route.base is None else route.base)):
        before = (0, 0, None) if route.base is None else best.get(route.base)
        if before is None or route.version > version:
            continue
        cost = (before[0] + route.num_bytes + request_bytes, before[1] + 1)
        if route.version not in best or cost < best[route.version][:2]:
            best[route.version] = (*cost, route)
    path: list[Route] = []
    at: int | None = version
    while at is not None and (found := best.get(at)) is not None and found[2] is not None:
        path.append(found[2])
        at = found[2].base
    if not path:
        start = "nothing" if held is None else f"version {held}"
        msg = f"no route leads from {start} to version {version}; read the head again, or load the newest version"
        raise IntegrityError(msg)
    if len(path) > MAX_PATH:
        msg = f"a path of {len(path)} routes to version {version} is refused: at most {MAX_PATH}; publish an anchor"
        raise IntegrityError(msg)
    return path[::-1]


def bytes_of(path: Collection[Route]) -> int:
    """Return the bytes of the objects along a path."""
    return sum(route.num_bytes for route in path)


def _check(routes: Collection[Route]) -> None:
    if len(routes) > MAX_ROUTES:
        msg = f"{len(routes)} routes are refused: at most {MAX_ROUTES}; let `etude weights gc` raise the floor"
        raise IntegrityError(msg)
    seen: set[tuple[int | None, int]] = set()
    for route in routes:
        forward = route.version >= 0 if route.base is None else 0 <= route.base < route.version
        if not (forward and 0 <= route.num_bytes <= _MAX_BYTES):
            msg = f"the route from {route.base} to {route.version} with {route.num_bytes} bytes is refused"
            raise IntegrityError(msg)
        if (route.base, route.version) in seen:
            msg = f"two routes from {route.base} to {route.version} are refused"
            raise IntegrityError(msg)
        seen.add((route.base, route.version))
