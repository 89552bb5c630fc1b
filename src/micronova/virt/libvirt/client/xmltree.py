"""Building XML elements and parsing libvirt's XML."""

import xml.etree.ElementTree as ET

Element = ET.Element


def element(name: str, text: str | None = None, /, **attributes: str | int | None) -> Element:
    """Return a new element; attributes that are None are left out."""
    made = Element(name, {key: str(value) for key, value in attributes.items() if value is not None})
    if text is not None:
        made.text = text
    return made


def child(parent: Element, name: str, text: str | None = None, /, **attributes: str | int | None) -> Element:
    """Append a new element to another and return it."""
    made = element(name, text, **attributes)
    parent.append(made)
    return made


def parse(text: str) -> Element:
    """Parse XML that libvirt returned."""
    return ET.fromstring(text)  # noqa: S314


def unparse(root: Element) -> str:
    """Return an element as text."""
    return ET.tostring(root, encoding="unicode")
