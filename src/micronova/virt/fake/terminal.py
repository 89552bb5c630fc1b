"""The serial port of a simulated guest: a login without a password, and a very small shell."""

import asyncio
from collections.abc import Callable

from micronova.virt.fake.guests import FakeGuest

LONGEST_LINE = 1024
_ENTER, _INTERRUPT, _END = 13, 3, 4
_ERASE = (8, 127)


def _uname(guest: FakeGuest, words: list[str]) -> str:
    return f"Linux {guest.hostname} 6.1.0-simulated"


_COMMANDS: dict[str, Callable[[FakeGuest, list[str]], str]] = {
    "echo": lambda guest, words: " ".join(words),
    "help": lambda guest, words: f"There are: {', '.join(sorted(_COMMANDS))}, exit. This guest is simulated.",
    "hostname": lambda guest, words: guest.hostname,
    "nproc": lambda guest, words: str(guest.vcpus),
    "uname": _uname,
}


async def run_terminal(guest: FakeGuest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one user until the connection ends."""
    terminal = Terminal(guest)
    writer.write(terminal.greeting())
    while data := await reader.read(4096):
        writer.write(terminal.typed(data))
        await writer.drain()


class Terminal:
    """Turns typed bytes into the bytes that the terminal shows."""

    def __init__(self, guest: FakeGuest) -> None:
        self._guest = guest
        self._user = ""
        self._line = bytearray()

    def greeting(self) -> bytes:
        """Return what is shown first."""
        return f"\r\nMicronova simulated guest, {self._guest.name}\r\n\r\n{self._prompt()}".encode()

    def typed(self, data: bytes) -> bytes:
        """Return what the terminal shows after some input."""
        shown = bytearray()
        for byte in data:
            if byte == _ENTER:
                shown += b"\r\n" + self._enter().encode()
            elif byte == _INTERRUPT:
                self._line.clear()
                shown += f"^C\r\n{self._prompt()}".encode()
            elif byte == _END and not self._line:
                self._user = ""
                shown += f"\r\n{self._prompt()}".encode()
            elif byte in _ERASE:
                if self._line:
                    self._line.pop()
                    shown += b"\b \b"
            elif byte >= 32 and len(self._line) < LONGEST_LINE:
                self._line.append(byte)
                shown.append(byte)
        return bytes(shown)

    def _prompt(self) -> str:
        return f"{self._user}@{self._guest.hostname}:~$ " if self._user else f"{self._guest.hostname} login: "

    def _enter(self) -> str:
        words = self._line.decode(errors="replace").split()
        self._line.clear()
        if not words:
            return self._prompt()
        if not self._user:
            self._user = words[0]
            return self._prompt()
        if words[0] == "exit":
            self._user = ""
            return self._prompt()
        command = _COMMANDS.get(words[0])
        said = command(self._guest, words[1:]) if command else f"sh: {words[0]}: not found (try help)"
        return f"{said}\r\n{self._prompt()}"
