"""HTML that cannot be broken out of: text is escaped unless `element` made it.

What a run shows was written by models, harnesses and sandboxed programs, so nothing here pastes strings into markup.
"""

import html


class Html(str):
    """Markup made by `element`: the only text that is not escaped again."""

    __slots__ = ()


def visible(text: str) -> str:
    r"""Return text in which whatever would not print, or would reorder what is printed, stands as an escape.

    Line breaks and tabs stay; an escape character becomes `\x1b`, a right-to-left override `\u202e`.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def element(name: str, *children: str | int | float | None, **attributes: str | float | bool | None) -> Html:
    """Return an element; children that are not markup are escaped, None is left out.

    An attribute's trailing underscore is dropped and others become dashes (`class_`, `stroke_width`); True gives an
    attribute without a value, False and None leave it out. Names are the caller's own words, never data.
    """
    written = "".join(
        f" {_attribute_name(key)}" + ("" if value is True else f'="{_escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = "".join(
        child if isinstance(child, Html) else _escaped(str(child)) for child in children if child is not None
    )
    return Html(f"<{name}{written}>{inside}</{name}>")


def joined(*parts: Html | None) -> Html:
    """Return several pieces of markup in a row; None is left out."""
    return Html("".join(part for part in parts if part is not None))


def page(*, title: str, style: str, body: Html) -> str:
    """Return a whole document that loads nothing, runs no script and sends nothing anywhere.

    `style` is the package's own stylesheet.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{_escaped(title)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


def _attribute_name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _escaped(text: str) -> str:
    return html.escape(visible(text), quote=True)
