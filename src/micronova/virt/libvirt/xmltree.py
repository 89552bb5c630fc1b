"""XML as data: making elements, and reading what libvirt wrote."""

import xml.etree.ElementTree as ET

Element = ET.Element


def element(name: str, text: str | None = None, /, **attributes: str | int | None) -> Element:
    """Make an element; attributes without a value are left out."""
    made = Element(name, {key: str(value) for key, value in attributes.items() if value is not None})
    if text is not None:
        made.text = text
    return made


def child(parent: Element, name: str, text: str | None = None, /, **attributes: str | int | None) -> Element:
    """Make an element inside another."""
    made = element(name, text, **attributes)
    parent.append(made)
    return made


def parse(text: str) -> Element:
    """Read an answer of libvirt's, or what it keeps for us."""
    return ET.fromstring(text)  # noqa: S314


def unparse(root: Element) -> str:
    """Write an element."""
    return ET.tostring(root, encoding="unicode")
