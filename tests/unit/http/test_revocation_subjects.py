"""Subjects of revocations that other versions stored or sent concern the same tokens."""

import pytest

from micronova.http.revocation_subjects import Subject
from micronova.http.tokens import Claims, Revocations

TOKEN = Claims(
    user_id="u",
    user_name="user",
    user_domain_id="home",
    issued_at=100.0,
    expires_at=900.0,
    audit_ids=("a", "first"),
    project_id="p",
    project_name="project",
    project_domain_id="d",
    application_credential_id="c",
    trust_id="t",
    trust_user_id="trustor",
    trust_user_domain_id="trustors",
    trust_agents=(("agent", "agents"),),
)
CONCERN_IT = [
    *("user:u", "user:trustor", "user:agent"),
    *("domain:home", "domain:d", "domain:trustors", "domain:agents"),
    *("grant:u:p", "grant:trustor:p", "grant:agent:p"),
    *("project:p", "credential:c", "trust:t", "audit:a", "audit:first"),
]
CONCERN_OTHERS = ["user:p", "project:d", "domain:x", "grant:u:other", "credential:t", "trust:c", "audit:u", "other:u"]


@pytest.mark.parametrize("subject", CONCERN_IT)
def test_a_subject_that_concerns_the_token(subject: str) -> None:
    revocations = Revocations()
    revocations.record(Subject(subject), 100.0, 900.0)
    assert revocations.covers(TOKEN)


@pytest.mark.parametrize("subject", CONCERN_OTHERS)
def test_a_subject_that_concerns_other_tokens(subject: str) -> None:
    revocations = Revocations()
    revocations.record(Subject(subject), 100.0, 900.0)
    assert not revocations.covers(TOKEN)
