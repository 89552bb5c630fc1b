"""Signed tickets."""

import pytest

from micronova.http.tickets import Tickets
from micronova.objects.errors import Unauthorized

KEY = b"0123456789abcdef"


def test_a_ticket_is_valid_for_its_subject_until_it_expires() -> None:
    tickets = Tickets(KEY)
    ticket = tickets.issue("image", 1000.9)
    tickets.verify(ticket, "image", 999.0)
    for subject, now in (("image", 1000.0), ("image", 2000.0), ("imagE", 0.0), ("", 0.0)):
        with pytest.raises(Unauthorized):
            tickets.verify(ticket, subject, now)


def test_tickets_cannot_be_forged() -> None:
    tickets = Tickets(KEY)
    expiry, _, signature = tickets.issue("image", 1000).partition(".")
    forged = [
        "", ".", signature, expiry, f"{expiry}.", f"2000.{signature}", f"01000.{signature}", f" {expiry}.{signature}",
        f"{expiry}.{signature}\n", f"{expiry}.{signature}=", f"+{expiry}.{signature}", f"{expiry}.{signature[::-1]}",
        f"{expiry}.{'A' * 43}", f"\N{ARABIC-INDIC DIGIT ONE}000.{signature}", f"{'9' * 5000}.{signature}",
    ]  # fmt: skip
    for ticket in forged:
        with pytest.raises(Unauthorized):
            tickets.verify(ticket, "image", 0)
    with pytest.raises(Unauthorized):
        Tickets(b"fedcba9876543210").verify(tickets.issue("image", 1000), "image", 0)


def test_expiry_and_subject_cannot_be_confused() -> None:
    tickets = Tickets(KEY)
    signature = tickets.issue("1\nimage", 1000).partition(".")[2]
    with pytest.raises(Unauthorized):
        tickets.verify(f"1000.{signature}", "image", 0)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError):
        Tickets(b"short")
