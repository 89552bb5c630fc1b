"""The revisions of the database, and with which of them the newest one works."""

WORKS_WITH = "0007"
"""The oldest revision whose release works with the newest one here. A revision that takes something away raises it."""
