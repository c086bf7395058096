"""Promises of the markup."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from etude.dashboard.html import element, joined, page, visible

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</pre></details><iframe src=//evil>",
    "&lt;script&gt;",
    "]]><!--",
    "\u202etxt.exe\u2066",
    "\x1b[2J\x07\x00\r",
    "\ud800",
    "\u200b\ufeff\u2028",
]
texts = st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=30)


class Seen(HTMLParser):
    """Tags, attributes and text of a document."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@given(texts, texts)
def test_text_and_attributes_come_out_as_they_went_in_and_make_no_markup(text: str, attribute: str):
    seen = Seen(element("p", text, element("b", "inner"), title=attribute))
    assert seen.tags == ["p", "b"]
    assert seen.attributes == [("title", visible(attribute))]
    assert seen.text == visible(text) + "inner"


@given(texts)
def test_nothing_invisible_or_reordering_is_left(text: str):
    shown = visible(text)
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    shown.encode()


def test_ordinary_text_is_left_alone():
    assert visible("né\n\tdef f():\n") == "né\n\tdef f():\n"
    assert visible("\x1b[31m\u202e") == r"\x1b[31m\u202e"


def test_attributes_of_true_none_and_with_dashes():
    assert element("a", None, 3, open=True, hidden=False, id=None, class_="x", stroke_width=2) == (
        '<a open class="x" stroke-width="2">3</a>'
    )


def test_a_page_forbids_scripts_and_every_load():
    document = page(title="<x>", style="p{}", body=joined(element("p", "a"), None))
    assert "default-src 'none'" in document
    assert "<title>&lt;x&gt;</title>" in document
