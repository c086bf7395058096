# pyright: basic
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.types import Head, Manifest, TensorEntry
from etude.weights.chain import needed_before, object_sizes, parse_head, parse_manifest
from etude.weights.digest import version_digest

SHA = "ab" * 32


def entry(**changes) -> TensorEntry:
    fields = {
        "name": "model.w",
        "dtype": "F32",
        "shape": (2, 3),
        "digest": "0" * 32,
        "object": SHA,
        "offset": 0,
        "length": 24,
        "encoding": "raw",
    }
    return TensorEntry(**fields | changes)


def manifest(*entries: TensorEntry, **changes) -> Manifest:
    fields = {
        "lineage": "one",
        "version": 3,
        "base": None,
        "digest": version_digest(entries),
        "step": 3,
        "tensors": entries,
    }
    return Manifest(**fields | changes)


def parse(document: Manifest) -> Manifest:
    return parse_manifest(msgspec.json.encode(document), lineage="one", version=3, max_bytes=1000)


def test_a_valid_manifest_is_read_as_it_was_written():
    document = manifest(entry(), entry(name="b", offset=24, length=5, encoding="rice_ulp"), base=2, base_digest=SHA)
    assert parse(document) == document
    assert object_sizes(document) == {SHA: 29}


@pytest.mark.parametrize(
    "document",
    [
        manifest(entry(), lineage="two"),
        manifest(entry(), version=4),
        manifest(entry(), base=3),
        manifest(entry(), base=-1),
        manifest(entry(), format=2),
        manifest(entry(), digest=SHA),
        manifest(entry(), entry(offset=24)),
        manifest(entry(), entry(name="b", offset=23)),
        manifest(entry(), entry(name="b", offset=25)),
        manifest(entry(offset=-1)),
        manifest(entry(offset=8)),
        manifest(entry(length=23)),
        manifest(entry(length=-24, shape=(-2, 3))),
        manifest(entry(shape=(1,) * 9, length=4)),
        manifest(entry(shape=(1 << 41, 0), length=0)),
        manifest(entry(shape=(1 << 20, 1 << 30), length=1 << 52)),
        manifest(entry(shape=(1000,), length=4000)),
        manifest(entry(dtype="F128")),
        manifest(entry(encoding="brotli")),
        manifest(entry(encoding="rice_ulp", length=5)),
        manifest(entry(encoding="rice_ulp", length=24), base=2),
        manifest(entry(encoding="rice_ulp", length=0), base=2),
        manifest(entry(name="../../etc/passwd")),
        manifest(entry(name="")),
        manifest(entry(name="a\x1b[31m")),
        manifest(entry(name="n" * 600)),
        manifest(entry(object="../head")),
        manifest(entry(digest="x")),
    ],
    ids=lambda document: msgspec.json.encode(document).decode()[:60],
)
def test_a_manifest_that_contradicts_itself_or_could_do_harm_is_refused(document):
    with pytest.raises(IntegrityError, match=r"weights/one/manifests/3\.json"):
        parse(document)


@given(st.binary(max_size=200))
def test_noise_is_no_manifest_and_no_head(data):
    with pytest.raises(IntegrityError):
        parse_manifest(data, lineage="one", version=3, max_bytes=1000)
    with pytest.raises(IntegrityError):
        parse_head(data)


@pytest.mark.parametrize(
    "head",
    [
        Head(lineage="../x", version=1, digest=SHA, anchor=0),
        Head(lineage="one", version=1, digest=SHA, anchor=2),
        Head(lineage="one", version=1, digest=SHA, anchor=-1),
        Head(lineage="one", version=1, digest="no", anchor=1),
        Head(lineage="one", version=1, digest=SHA, anchor=1, format=9),
    ],
)
def test_a_head_that_could_do_harm_is_refused(head):
    with pytest.raises(IntegrityError, match="weights/head"):
        parse_head(msgspec.json.encode(head))


@given(
    anchors=st.sets(st.integers(0, 30)).map(lambda found: found | {0}),
    version=st.integers(0, 30),
    held=st.none() | st.integers(0, 30),
)
def test_the_walk_back_ends_at_what_is_held_or_at_the_newest_anchor(anchors, version, held):
    chain = {n: manifest(version=n, base=None if n in anchors else n - 1, base_digest=f"d{n - 1}") for n in range(31)}
    mine = None if held is None else ("one", held, f"d{held}")
    path = [version]
    while (older := needed_before(chain[path[-1]], mine)) is not None:
        path.append(older)
    newest_anchor = max(n for n in anchors if n <= version)
    assert path[-1] == (held + 1 if held is not None and newest_anchor <= held < version else newest_anchor)
    assert path == list(range(version, path[-1] - 1, -1))


def test_weights_of_another_lineage_or_with_other_bytes_are_no_base():
    difference = manifest(base=2, base_digest=SHA)
    assert needed_before(difference, ("one", 2, SHA)) is None
    assert needed_before(difference, ("two", 2, SHA)) == 2
    assert needed_before(difference, ("one", 2, "other")) == 2
