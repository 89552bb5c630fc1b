"""The format of traces: one request per line, as JSON, in the order of arrival.

`docs/fleet-simulator.md` describes the fields. Requests that ask for the same share one `RequestSpec`, so that a
trace of 100,000 lines needs little memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import SERVER_HINTS, GroupSpec, RequestSpec
from micronova.objects.wrong_values import wrong_value

MOST_SERVERS: Final = 1_000
"""Servers of one request."""
_LONGEST_LINE: Final = 65_536
_EXAMPLE: Final = '{"at": 60, "lifetime": 3600, "flavor": {"name": "m1.small", "vcpus": 1, "ram": 2048, "disk": 20}}'

T = TypeVar("T", bound=msgspec.Struct)
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[int, Meta(ge=0, le=1 << 40)]


class TraceFlavor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A flavor, with the units of the compute API."""

    name: Name
    vcpus: Annotated[int, Meta(ge=1, le=1 << 20)]
    ram: Annotated[int, Meta(ge=1, le=1 << 40)]  # MiB
    disk: Amount = 0  # GiB
    ephemeral: Amount = 0  # GiB
    swap: Amount = 0  # MiB
    extra_specs: dict[str, str] = {}

    def flavor(self) -> Flavor:
        """Return it as the scheduler knows flavors."""
        return Flavor(id=self.name, **msgspec.structs.asdict(self))


class TraceGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The server group of a request; requests with the same id share it."""

    id: Name
    policy: Literal["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]
    max_server_per_host: Annotated[int, Meta(ge=1)] = 1


class TraceImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What filters know of the image of a request."""

    id: Name = "image"
    disk_format: Name = "raw"
    properties: dict[str, str] = {}


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a trace."""

    at: Seconds
    lifetime: Annotated[float, Meta(gt=0, le=1e10)] | None = None  # seconds; None: to the end of the trace
    flavor: TraceFlavor | Name  # a name stands for a flavor of a line above
    count: Annotated[int, Meta(ge=1, le=MOST_SERVERS)] = 1
    id: Name | None = None  # by which hints of later lines name these servers
    project: Name = "project"
    zone: Name | None = None
    group: TraceGroup | None = None
    image: TraceImage | None = None
    hints: dict[str, list[str]] = {}


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace, as the scheduler takes it."""

    at: float
    lifetime: float | None
    count: int
    spec: RequestSpec
    id: str | None = None
    line: int = 0  # of the file; 0: it is not from a file


def read_trace(path: Path) -> list[Request]:
    """Read a trace; raise Invalid with the number of a line that is wrong, and what would be right."""
    try:
        with path.open("rb") as file:
            found = list(_Reader(str(path)).read(file))
    except OSError as error:
        raise Invalid(f"Cannot read {path}: {error.strerror}.") from None
    if not found:
        raise Invalid(f"{path} has no requests. A line is, for example: {_EXAMPLE}")
    return found


class _Reader:
    """Reads lines, which may name flavors and groups of the lines before."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._flavors: dict[str, TraceFlavor] = {}
        self._groups: dict[str, TraceGroup] = {}
        self._made: dict[str, Flavor] = {}
        self._specs: dict[bytes, RequestSpec] = {}
        self._ids: set[str] = set()
        self._decoder = msgspec.json.Decoder(TraceLine)

    def read(self, lines: Iterable[bytes]) -> Iterator[Request]:
        """Yield the requests; empty lines are skipped."""
        before = 0.0
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                line = self._decode(text)
                if line.at < before:
                    raise Invalid(
                        f"at is {line.at:g}, before that of the line above ({before:g}). Sort the lines by arrival."
                    )
                before = line.at
                yield self._request(line, number)
            except Invalid as error:
                raise Invalid(f"{self._name}, line {number}: {error.message}") from None

    def _decode(self, text: bytes) -> TraceLine:
        if len(text) > _LONGEST_LINE:
            raise Invalid(f"The line has {len(text)} bytes. A line has at most {_LONGEST_LINE}.")
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError as error:
            problem = wrong_value(error, TraceLine).named("the line")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = f"the line is not JSON in UTF-8 ({error})"
        raise Invalid(f"{problem}. A line is, for example: {_EXAMPLE}")

    def _request(self, line: TraceLine, number: int) -> Request:
        flavor = self._flavor(line.flavor)
        if line.group is not None and self._groups.setdefault(line.group.id, line.group) != line.group:
            raise Invalid(f"The group {line.group.id} has another policy in a line above. Give both lines the same.")
        for hint in (each for each in SERVER_HINTS if each in line.hints):
            if unknown := [each for each in line.hints[hint] if each not in self._ids]:
                raise Invalid(f"The hint {hint} names {unknown[0]}, but no line above has this id.")
        if line.id is not None:
            if line.id in self._ids:
                raise Invalid(f"A line above has the id {line.id}, too. Each id names the servers of one line.")
            self._ids.add(line.id)
        return Request(
            at=line.at,
            lifetime=line.lifetime,
            count=line.count,
            spec=self._spec(line, flavor),
            id=line.id,
            line=number,
        )

    def _flavor(self, given: TraceFlavor | str) -> Flavor:
        if isinstance(given, str):
            if given not in self._made:
                raise Invalid(
                    f"No line above has the flavor {given}. Its first line gives the flavor whole: "
                    '"flavor": {"name": …, "vcpus": …, "ram": …, "disk": …}.'
                )
            return self._made[given]
        if self._flavors.setdefault(given.name, given) != given:
            raise Invalid(f"The flavor {given.name} is another one in a line above. Give one of them another name.")
        return self._made.setdefault(given.name, given.flavor())

    def _spec(self, line: TraceLine, flavor: Flavor) -> RequestSpec:
        """Return the spec of a line; equal lines share it."""
        key = msgspec.msgpack.encode(
            (flavor.name, line.project, line.zone, line.group, line.image, sorted(line.hints.items()))
        )
        found = self._specs.get(key)
        if found is None:
            image = None
            if line.image is not None:
                image = ImageMeta(**msgspec.structs.asdict(line.image))
            found = self._specs[key] = RequestSpec(
                project_id=line.project,
                user_id="user",
                flavor=flavor,
                image=image,
                availability_zone=line.zone,
                hints=line.hints,
                server_group=None if line.group is None else GroupSpec(**msgspec.structs.asdict(line.group)),
            )
        return found


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write requests as a trace; the first line of a flavor has it whole, the others its name."""
    known: set[str] = set()
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for request in requests:
            file.write(encoder.encode(_line(request, known)) + b"\n")


def _line(request: Request, known: set[str]) -> TraceLine:
    spec = request.spec
    flavor: TraceFlavor | str = spec.flavor.name
    if spec.flavor.name not in known:
        known.add(spec.flavor.name)
        flavor = _as(TraceFlavor, spec.flavor)
    return TraceLine(
        at=request.at,
        lifetime=request.lifetime,
        flavor=flavor,
        count=request.count,
        id=request.id,
        project=spec.project_id,
        zone=spec.availability_zone,
        group=None if spec.server_group is None else _as(TraceGroup, spec.server_group),
        image=None if spec.image is None else _as(TraceImage, spec.image),
        hints=spec.hints,
    )


def _as(kind: type[T], whole: msgspec.Struct) -> T:
    """Return the part of an object that a trace has."""
    return msgspec.convert({name: getattr(whole, name) for name in kind.__struct_fields__}, kind)
