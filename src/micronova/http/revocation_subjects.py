"""Subjects of revocations: which tokens a revocation concerns.

The identity service stores a subject in the transaction that revokes, and lists it for services that verify tokens by
signature. A subject is its kind and its ids, with colons between them. The format is stored and sent: add kinds, and
change none. The tokens are:

- `user:ID`: of a user.
- `project:ID`: for a project.
- `domain:ID`: of the users of a domain, for the domain, and for its projects.
- `grant:USER_ID:TARGET_ID`: of a user, for one project, one domain or `system`.
- `credential:ID`: for an application credential, not for a resource of `/v3/credentials`.
- `trust:ID`: for a trust.
- `audit:ID`: one token, and those made from it.

A token for a trust counts as a token of each party of the trust.
"""

from typing import NewType

Subject = NewType("Subject", str)


def user(user_id: str) -> Subject:
    """Return the subject of a user's tokens."""
    return Subject(f"user:{user_id}")


def project(project_id: str) -> Subject:
    """Return the subject of the tokens for a project."""
    return Subject(f"project:{project_id}")


def domain(domain_id: str) -> Subject:
    """Return the subject of the tokens of a domain's users, for the domain, and for its projects."""
    return Subject(f"domain:{domain_id}")


def application_credential(application_credential_id: str) -> Subject:
    """Return the subject of the tokens for an application credential."""
    return Subject(f"credential:{application_credential_id}")


def trust(trust_id: str) -> Subject:
    """Return the subject of the tokens for a trust."""
    return Subject(f"trust:{trust_id}")


def grant(user_id: str, target_id: str) -> Subject:
    """Return the subject of a user's tokens for one project, one domain, or the system (`system`)."""
    return Subject(f"grant:{user_id}:{target_id}")


def audit(audit_id: str) -> Subject:
    """Return the subject of one token and those made from it."""
    return Subject(f"audit:{audit_id}")


def parts(subject: Subject) -> list[str]:
    """Return the kind of a subject and its ids."""
    return subject.split(":")
