"""Checks of the other OpenStack services: each answers a request of the service user, and has the same time."""

import email.utils
import time
from collections.abc import Iterator

from micronova.cli.checks.databases import clock_finding
from micronova.cli.checks.shape import CONTROL_ROLES, HOST_ROLES, Check, Finding, Subject
from micronova.cli.clients import Question
from micronova.cli.names import EMBEDDED_ROLES
from micronova.conf.settings import SettingsError
from micronova.objects.errors import MicronovaError

ROLES = (*CONTROL_ROLES, *HOST_ROLES, *EMBEDDED_ROLES)
NEEDED_BY = {
    "identity": ("api", "conductor", "image", "network", "volume"),
    "image": ("api", "conductor", "volume", "compute"),
    "network": ("api", "conductor", "network-agent"),
    "volume": ("api", "conductor"),
    "compute": ("network",),
    "metadata": ("network-agent",),
    "key-manager": ("api", "image"),
}


def checks(subject: Subject) -> Iterator[Check]:
    """Return a check for each service that the settings name and the roles need."""
    identity = subject.settings.identity
    process = subject.process
    if identity.auth_url and not identity.password and not subject.place.has_keys():
        yield Check("service identity", NEEDED_BY["identity"], _no_password)
        return
    try:
        questions = list(process.clients.questions())
    except SettingsError as error:
        yield Check("services", ROLES, _Fails(error))
        return
    for question in questions:
        roles = NEEDED_BY[question.service]
        own = subject.roles_are_named and question.service in subject.roles and question.service != "identity"
        if not own and (subject.among(roles) or not subject.roles_are_named):
            right = _right(subject, question)
            name = f"service {question.service}"
            yield Check(name, roles, _Asks(question, right), question.setting, right)


def _right(subject: Subject, question: Question) -> str:
    identity = subject.settings.identity
    if question.service == "identity":
        return (
            f"the URL of a Keystone (https://HOST/v3) that knows the user {identity.username} by identity.password, "
            f"with the role service or admin in the project {identity.project_name} (identity.project_name)"
        )
    if question.service in ("image", "network", "volume") and identity.auth_url:
        return (
            f"the URL of the service, or an endpoint in the region {identity.region_name} (identity.region_name) of "
            "the catalog, as `openstack catalog list` shows it"
        )
    return "the URL of the service"


async def _no_password(subject: Subject) -> list[Finding]:
    found = f"the user {subject.settings.identity.username} has no password"
    return [Finding("identity.password", found, "the password of this user in the identity service")]


class _Fails:
    def __init__(self, error: MicronovaError) -> None:
        self._error = error

    async def __call__(self, subject: Subject) -> list[Finding]:
        raise self._error


class _Asks:
    def __init__(self, question: Question, right: str) -> None:
        self._question = question
        self._right = right

    async def __call__(self, subject: Subject) -> list[Finding]:
        question = self._question
        settings = subject.settings
        if question.service == "volume" and not settings.cinder.endpoint_override and settings.identity.auth_url:
            kind = settings.cinder.service_type
            try:
                there = await subject.process.clients.catalog().has(kind)
            except MicronovaError:
                there = True  # the question says what is wrong
            if not there:
                found = f"the catalog has no service of the type {kind}, so there are no volumes"
                return [Finding("cinder.endpoint_override", found, self._right, "unknown")]
        try:
            await question.ask()
        except MicronovaError as error:
            setting = question.setting
            if question.service == "identity" and "does not accept" in error.message:
                setting = "identity.password"
            return [Finding(setting, error.message, self._right)]
        findings = await self._clock()
        if not findings and question.left_open:
            findings = [Finding(question.setting, question.left_open, outcome="unknown")]
        return findings

    async def _clock(self) -> list[Finding]:
        begin = time.time()
        answer = await self._question.transport.request("GET", "/", {"accept": "application/json"}, None)
        said = email.utils.parsedate_to_datetime(answer.headers["date"]) if "date" in answer.headers else None
        if said is None:
            return []
        return clock_finding(said.timestamp(), begin, time.time(), f"the {self._question.service} service")
