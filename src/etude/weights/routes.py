"""The ways to each version: pages of routes that the head leads to."""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from etude.weight_types import PageName, Route, RoutePage
from etude.weights.chain import WEIGHTS, ChainKeys, check_lineage, decode_record, is_sha256, require

MAX_PAGE_BYTES = 1 << 20
ROUTES_PER_PAGE = 64
"""Beyond which the next version begins a page: what a version costs must not grow with the run."""
_MAX_ROUTES = 4096
_MAX_BYTES = 1 << 53


def encode_page(page: RoutePage) -> tuple[bytes, str]:
    """Return a page's bytes and their sha256, which is the name of its object."""
    data = msgspec.json.encode(page)
    return data, hashlib.sha256(data).hexdigest()


def parse_page(data: bytes, *, lineage: str, digest: str, keys: ChainKeys = WEIGHTS) -> RoutePage:
    """Return the page whose sha256 is `digest`; raise `IntegrityError` when it is another one or no valid one."""
    place = keys.object(lineage, digest)
    require(hashlib.sha256(data).hexdigest() == digest, place, "its bytes are not those of its name; fetch it again")
    page = decode_record(data, RoutePage, place, advice="restore it, or start a new lineage")
    require(page.lineage == check_lineage(lineage, place), place, "it is of another lineage")
    if page.older is not None:
        check_lineage(page.older.lineage, place)
        require(is_sha256(page.older.page), place, "the name of the page before is not a sha256")
    require(0 < len(page.routes) <= _MAX_ROUTES, place, f"it has {len(page.routes)} routes")
    last = 0
    for route in page.routes:
        require(last <= route.version, place, "its routes are not in order")
        last = route.version
        require(route.base is None or 0 <= route.base < route.version, place, "a base is not an older version")
        require(0 <= route.num_bytes <= _MAX_BYTES, place, "a size is out of range")
        require(is_sha256(route.manifest), place, "the name of a manifest is not a sha256")
    return page


def extended(page: RoutePage | None, name: PageName | None, lineage: str, routes: Sequence[Route]) -> RoutePage:
    """Return the page that has these routes to the newest version as well; `name` is that of `page`, the newest.

    All routes to a version are on one page.
    """
    if page is None or page.lineage != lineage:
        return RoutePage(lineage=lineage, routes=tuple(routes), older=name)
    if len(page.routes) >= ROUTES_PER_PAGE and page.routes[-1].version != routes[0].version:
        return RoutePage(lineage=lineage, routes=tuple(routes), older=name)
    return replace(page, routes=(*page.routes, *routes))


def anchor_is_due(routes: Sequence[Route], anchor: int, *, share: float) -> bool:
    """Whether the differences after an anchor have more than a share of its bytes.

    Of several routes to a version the one with the newest base counts: it is what a reader takes that follows.
    """
    size = min((route.num_bytes for route in routes if route.version == anchor and route.base is None), default=0)
    newest: dict[int, Route] = {}
    for route in routes:
        before = newest.get(route.version)
        if route.version > anchor and route.base is not None and (before is None or route.base > (before.base or 0)):
            newest[route.version] = route
    return sum(route.num_bytes for route in newest.values()) > share * size
