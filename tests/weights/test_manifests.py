# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import hashlib
import itertools
import tracemalloc

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from etude.errors import IntegrityError
from etude.weight_types import Box, Head, Manifest, PageName, Piece, Route, RoutePage, TensorEntry, VersionName
from etude.weights.boxes import make_up, runs, slabs, whole
from etude.weights.chain import ChainKeys, parse_head
from etude.weights.digest import version_digest
from etude.weights.manifests import MAX_MANIFEST_BYTES, encode_manifest, object_sizes, parse_manifest
from etude.weights.routes import ROUTES_PER_PAGE, encode_page, extended, parse_page

SHA, OTHER = "ab" * 32, "cd" * 32


def entry(**changes) -> TensorEntry:
    return TensorEntry(**{"name": "model.w", "dtype": "F32", "shape": (2, 3), "digest": "0" * 32} | changes)


def piece(*boxes: Box, **changes) -> Piece:
    boxes = boxes or (Box(0, (0, 0), (2, 3)),)
    return Piece(**{"object": SHA, "offset": 0, "length": 24, "encoding": "raw", "boxes": boxes} | changes)


ENTRIES, PIECES = (entry(),), (piece(),)


def manifest(entries=ENTRIES, pieces=PIECES, **changes) -> Manifest:
    fields = {"lineage": "one", "epoch": 1, "version": 3, "base": None, "digest": version_digest(entries), "step": 3}
    return Manifest(**fields | {"tensors": tuple(entries), "pieces": tuple(pieces)} | changes)


def parse_bytes(data: bytes) -> Manifest:
    return parse_manifest(data, lineage="one", version=3, digest=hashlib.sha256(data).hexdigest(), max_bytes=1000)


def parse(document: Manifest) -> Manifest:
    return parse_bytes(encode_manifest(document)[0])


def test_a_valid_manifest_is_read_as_it_was_written():
    document = manifest(
        [entry(), entry(name="b"), entry(name="scalar", shape=()), entry(name="empty", shape=(0, 7))],
        [
            piece(),
            piece(Box(1, (0, 0), (2, 1)), Box(2, (), ()), offset=24, length=5, encoding="rice_ulp"),
            piece(Box(1, (0, 1), (2, 2)), object=OTHER, length=16),
        ],
        base=2,
        base_digest=SHA,
        parent=VersionName(lineage="one", version=2, digest=SHA),
    )
    assert parse(document) == document
    assert object_sizes(document) == {SHA: 29, OTHER: 16}


def test_two_equal_tensors_may_be_the_same_bytes_of_an_object():
    document = manifest([entry(), entry(name="b")], [piece(), piece(Box(1, (0, 0), (2, 3)))])
    assert object_sizes(parse(document)) == {SHA: 24}


HOSTILE = {
    "another lineage": manifest(lineage="two"),
    "another version": manifest(version=4),
    "epoch 0": manifest(epoch=0),
    "its own base": manifest(base=3),
    "a base before the first": manifest(base=-1),
    "another format": manifest(format=1),
    "another digest": manifest(digest=SHA),
    "a parent with a path for a name": manifest(parent=VersionName(lineage="../x", version=2, digest=SHA)),
    "a parent without a digest": manifest(parent=VersionName(lineage="one", version=2, digest="")),
    "a name twice": manifest([entry(), entry()], [piece(), piece(Box(1, (0, 0), (2, 3)), offset=24)]),
    "an overlap in the object": manifest(
        [entry(), entry(name="b")], [piece(), piece(Box(1, (0, 0), (2, 3)), offset=23)]
    ),
    "a gap in the object": manifest([entry(), entry(name="b")], [piece(), piece(Box(1, (0, 0), (2, 3)), offset=25)]),
    "a gap before the object": manifest(pieces=[piece(offset=8)]),
    "an offset below zero": manifest(pieces=[piece(offset=-1)]),
    "an object beyond all sizes": manifest(pieces=[piece(offset=1 << 62)]),
    "too few raw bytes": manifest(pieces=[piece(length=23)]),
    "a negative dimension": manifest([entry(shape=(-2, 3))], [piece(length=-24)]),
    "nine dimensions": manifest([entry(shape=(1,) * 9)], [piece(Box(0, (0,) * 9, (1,) * 9), length=4)]),
    "an endless dimension": manifest([entry(shape=(1 << 41, 0))], []),
    "an endless tensor": manifest([entry(shape=(1 << 20, 1 << 30))], []),
    "more bytes than allowed": manifest([entry(shape=(1000,))], [piece(Box(0, (0,), (1000,)), length=4000)]),
    "an unknown dtype": manifest([entry(dtype="F128")]),
    "an unknown encoding": manifest(pieces=[piece(encoding="brotli")]),
    "a difference in an anchor": manifest(pieces=[piece(encoding="rice_ulp", length=5)]),
    "a difference as large as the tensor": manifest(pieces=[piece(encoding="rice_ulp")], base=2),
    "a difference of nothing": manifest(pieces=[piece(encoding="rice_ulp", length=0)], base=2),
    "a path for a name": manifest([entry(name="../../etc/passwd")]),
    "a path within a name": manifest([entry(name="model/../../x")]),
    "no name": manifest([entry(name="")]),
    "a name with an escape": manifest([entry(name="a\x1b[31m")]),
    "a long name": manifest([entry(name="n" * 600)]),
    "a path for an object": manifest(pieces=[piece(object="../head")]),
    "no digest": manifest([entry(digest="x")]),
    "a digest of 31 digits": manifest([entry(digest="0" * 31)]),
    "no boxes at all": manifest(pieces=[]),
    "a piece without boxes": manifest(pieces=[piece(), piece(boxes=(), offset=24, length=1)]),
    "a box of no tensor": manifest(pieces=[piece(Box(1, (0, 0), (2, 3)))]),
    "a box of the tensor before the first": manifest(pieces=[piece(Box(-1, (0, 0), (2, 3)))]),
    "a box with one dimension too few": manifest(pieces=[piece(Box(0, (0,), (6,)))]),
    "a box beyond the tensor": manifest(pieces=[piece(Box(0, (1, 0), (2, 3)))]),
    "a box before the tensor": manifest(pieces=[piece(Box(0, (-1, 0), (2, 3)))]),
    "a box that wraps around": manifest(pieces=[piece(Box(0, (1 << 63, 0), (2, 3)))]),
    "an empty box": manifest(pieces=[piece(Box(0, (0, 0), (0, 3)), Box(0, (0, 0), (2, 3)))]),
    "a box left out": manifest(pieces=[piece(Box(0, (0, 0), (1, 3)), length=12)]),
    "a box twice": manifest(pieces=[piece(Box(0, (0, 0), (1, 3)), Box(0, (0, 0), (1, 3)))]),
    "an overlap and a hole": manifest(pieces=[piece(Box(0, (0, 0), (2, 2)), Box(0, (0, 1), (2, 1)))]),
    "two dtypes in one piece": manifest(
        [entry(), entry(name="b", dtype="BF16")], [piece(Box(0, (0, 0), (2, 3)), Box(1, (0, 0), (2, 3)), length=36)]
    ),
}


@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_that_contradicts_itself_or_could_do_harm_is_refused(document):
    with pytest.raises(IntegrityError, match=r"weights/one/manifests/3-[0-9a-f]{16}\.json"):
        parse(document)


def test_a_manifest_with_other_bytes_than_its_name_says_is_refused():
    data, digest = encode_manifest(manifest())
    with pytest.raises(IntegrityError, match="not those of its name"):
        parse_manifest(data + b" ", lineage="one", version=3, digest=digest, max_bytes=1000)


@given(st.binary(max_size=200))
def test_noise_is_no_manifest_no_page_and_no_head(data):
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(IntegrityError):
        parse_bytes(data)
    with pytest.raises(IntegrityError):
        parse_bytes(zstandard.compress(data))
    with pytest.raises(IntegrityError):
        parse_head(data)
    with pytest.raises(IntegrityError):
        parse_page(data, lineage="one", digest=digest)


@given(st.data())
def test_a_manifest_with_any_part_replaced_is_refused_or_still_makes_sense(data):
    document = manifest(
        [entry(), entry(name="b")],
        [piece(), piece(Box(1, (0, 0), (2, 3)), offset=24, length=5, encoding="exp_ctx")],
        base=2,
    )
    tree = msgspec.json.decode(zstandard.decompress(encode_manifest(document)[0]))
    place, key = tree, data.draw(st.sampled_from(sorted(tree)))
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.integers(0, 4)):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
    place[key] = data.draw(
        st.none() | st.integers(-(2**65), 2**65) | st.sampled_from(["", "x", SHA, "../x", [], {}, 0.5, True, [[]] * 50])
    )
    try:
        found = parse_bytes(zstandard.compress(msgspec.json.encode(tree)))
    except IntegrityError:
        return
    assert [found.tensors[0].shape, found.tensors[1].shape] == [(2, 3), (2, 3)]
    assert {one.object for one in found.pieces} <= {SHA}


@pytest.mark.parametrize(
    "text",
    [
        b'{"tensors":' + b"[" * 200_000,
        b'{"version":' + b"9" * 5000 + b"}",
        b'{"lineage":"one","pieces":[' + b",".join([b'{"boxes":[[0,[],[]]]}'] * 2_000) + b"]}",
        msgspec.json.encode(manifest([entry(shape=(1 << 13,), dtype="U8")], [
            piece(*(Box(0, (0,), (1,)) for _ in range(1 << 13)), length=1 << 13)
        ])),
    ],
    ids=["nesting", "a long number", "many pieces", "many overlapping boxes"],
)  # fmt: skip
def test_a_manifest_made_to_exhaust_a_reader_costs_little_more_than_reading_it(text):
    data = zstandard.compress(text)
    tracemalloc.start()
    with pytest.raises(IntegrityError):
        parse_manifest(data, lineage="one", version=3, digest=hashlib.sha256(data).hexdigest(), max_bytes=1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * len(text)


@pytest.mark.parametrize("claims", [True, False])
def test_a_small_manifest_that_would_become_a_huge_one_is_refused_before_it_does(claims):
    compressor = zstandard.ZstdCompressor(write_content_size=claims)
    data = compressor.compress(bytes(MAX_MANIFEST_BYTES + 1))
    tracemalloc.start()
    with pytest.raises(IntegrityError, match=r"too many|does not say"):
        parse_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_boxes_that_are_cut_along_too_many_axes_are_refused():
    boxes = [Box(0, start, (1, 1, 1, 1)) for start in itertools.product(range(2), repeat=4)]
    document = manifest([entry(shape=(2, 2, 2, 2))], [piece(*boxes, length=64)])
    with pytest.raises(IntegrityError, match="cut along 4 axes"):
        parse(document)


@st.composite
def cuts(draw):
    """A shape, and boxes that make it up: it is cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [Box(0, (0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(1, max(1, box.shape[axis] - 1)))
        for begin, size in ((0, min(first, box.shape[axis])), (first, box.shape[axis] - first)):
            if size > 0:
                start = tuple(at + begin * (place == axis) for place, at in enumerate(box.start))
                sizes = tuple(size if place == axis else kept for place, kept in enumerate(box.shape))
                boxes.append(Box(0, start, sizes))
    return shape, boxes


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + b) for a, b in zip(box.start, box.shape, strict=True))))


@given(cuts())
def test_boxes_make_up_a_tensor_exactly_when_each_element_is_in_one(found):
    shape, boxes = found
    assert make_up(boxes, shape)
    for index, box in enumerate(boxes):
        others = boxes[:index] + boxes[index + 1 :]
        assert not make_up(others, shape)
        for axis in range(len(shape)):
            moved = replace(box, start=tuple(at + (place == axis) for place, at in enumerate(box.start)))
            if moved.start[axis] + moved.shape[axis] <= shape[axis]:
                counts = [element for one in [*others, moved] for element in elements(one)]
                exact = sorted(counts) == sorted(elements(whole(0, shape)))
                assert make_up([*others, moved], shape) == exact


@given(cuts())
def test_the_runs_of_a_box_are_its_elements_in_order(found):
    shape, boxes = found
    for box in boxes:
        begins, run = runs(box, shape)
        flat = [begin + offset for begin in begins.tolist() for offset in range(run)]
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        assert flat == [sum(a * b for a, b in zip(at, strides, strict=True)) for at in sorted(elements(box))]


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 60))
def test_slabs_are_runs_of_bounded_size_that_make_up_a_tensor(shape, most):
    boxes = [Box(0, start, size) for start, size in slabs(shape, most)]
    end = 0
    for box in boxes:
        begins, run = runs(box, shape)
        assert run <= most or not run
        if run:
            assert begins.tolist() == [end]
        end += run
    if all(shape):
        assert len(boxes) == 1 or end == sum(len(elements(box)) for box in boxes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lineage": "../x"},
        {"lineage": ""},
        {"anchor": 2},
        {"anchor": -1},
        {"floor": 2},
        {"floor": -1},
        {"version": -1},
        {"version": 1 << 60},
        {"epoch": 0},
        {"epoch": 1 << 60},
        {"digest": "no"},
        {"routes": ""},
        {"routes": "../../head"},
        {"writer": "a name"},
        {"format": 1},
    ],
)
def test_a_head_that_could_do_harm_is_refused(changes):
    head = Head(lineage="one", version=1, digest=SHA, anchor=1, epoch=2, routes=SHA, writer="0f")
    data = msgspec.json.encode(head)
    assert parse_head(data) == head
    assert len(data) < 1024
    with pytest.raises(IntegrityError, match="views/fp8/head"):
        parse_head(msgspec.json.encode(replace(head, **changes)), keys=ChainKeys("views/fp8"))


@pytest.mark.parametrize(
    "changes",
    [
        {"lineage": "two"},
        {"format": 1},
        {"routes": ()},
        {"routes": (Route(None, 3, 9, SHA), Route(1, 2, 9, SHA))},
        {"routes": (Route(3, 3, 9, SHA),)},
        {"routes": (Route(-1, 3, 9, SHA),)},
        {"routes": (Route(None, -1, 9, SHA),)},
        {"routes": (Route(None, 3, -1, SHA),)},
        {"routes": (Route(None, 3, 1 << 60, SHA),)},
        {"routes": (Route(None, 3, 9, "../x"),)},
        {"routes": (Route(None, 3, 9, SHA),) * 5000},
        {"older": PageName("../x", SHA)},
        {"older": PageName("one", "x")},
    ],
)
def test_a_page_of_routes_that_could_do_harm_is_refused(changes):
    page = RoutePage(lineage="one", routes=(Route(None, 3, 9, SHA), Route(3, 4, 5, SHA)), older=PageName("two", SHA))
    data, digest = encode_page(page)
    assert parse_page(data, lineage="one", digest=digest) == page
    data, digest = encode_page(replace(page, **changes))
    with pytest.raises(IntegrityError, match=f"weights/one/objects/{digest}"):
        parse_page(data, lineage="one", digest=digest)
    with pytest.raises(IntegrityError, match="not those of its name"):
        parse_page(data, lineage="one", digest=SHA)


def test_pages_stay_short_and_lead_back_to_the_first():
    pages: dict[PageName, RoutePage] = {}
    name = page = None
    for version in range(10 * ROUTES_PER_PAGE):
        lineage = "one" if version < 100 else "two"
        routes = [Route(version - 1 if version else None, version, 1, SHA)]
        if version % 5 == 0:
            routes.append(Route(None, version, 1, SHA))
        for route in routes:
            page = extended(page, name, lineage, [route])
        name = PageName(lineage, encode_page(page)[1])
        pages[name] = page
    found: list[Route] = []
    while name is not None:
        assert len(pages[name].routes) <= ROUTES_PER_PAGE + 1
        found = [*pages[name].routes, *found]
        name = pages[name].older
    assert {route.version for route in found} == set(range(10 * ROUTES_PER_PAGE))
    assert len(found) == 12 * ROUTES_PER_PAGE
