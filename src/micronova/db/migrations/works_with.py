"""With which older releases the newest revision of this package works."""

OLDEST = "0032"
"""The newest revision of the oldest release that works with it. A revision that takes something away raises this."""
