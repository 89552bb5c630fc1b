"""The list of all routes of the identity service."""

import dataclasses

from micronova.embedded.identity.api.application_credentials import AccessRulesAPI, ApplicationCredentialsAPI
from micronova.embedded.identity.api.auth import AuthAPI
from micronova.embedded.identity.api.catalog import EndpointsAPI, RegionsAPI, ServicesAPI
from micronova.embedded.identity.api.credentials import CredentialsAPI, EC2CredentialsAPI
from micronova.embedded.identity.api.documents import DocumentsAPI
from micronova.embedded.identity.api.domains import DomainsAPI
from micronova.embedded.identity.api.ec2_tokens import EC2TokensAPI
from micronova.embedded.identity.api.grants import GrantsAPI
from micronova.embedded.identity.api.groups import GroupsAPI
from micronova.embedded.identity.api.limits import LimitsAPI, RegisteredLimitsAPI
from micronova.embedded.identity.api.projects import ProjectsAPI
from micronova.embedded.identity.api.revocations import RevocationsAPI
from micronova.embedded.identity.api.role_assignments import RoleAssignmentsAPI
from micronova.embedded.identity.api.roles import RolesAPI
from micronova.embedded.identity.api.trusts import TrustsAPI
from micronova.embedded.identity.api.users import UsersAPI
from micronova.embedded.identity.core import Core
from micronova.http.service import Route


def all_routes(core: Core) -> list[Route]:
    """Return every route; every path with GET also has HEAD."""
    resources = (
        AuthAPI, DomainsAPI, ProjectsAPI, UsersAPI, GroupsAPI, RolesAPI, GrantsAPI, RoleAssignmentsAPI,
        ApplicationCredentialsAPI, AccessRulesAPI, CredentialsAPI, EC2CredentialsAPI, EC2TokensAPI, TrustsAPI,
        RegionsAPI, ServicesAPI, EndpointsAPI, RegisteredLimitsAPI, LimitsAPI, RevocationsAPI,
    )  # fmt: skip
    declared = DocumentsAPI().routes()
    for resource in resources:
        declared += resource(core).routes()
    with_head = {route.path for route in declared if route.method == "HEAD"}
    readable = [route for route in declared if route.method == "GET" and route.path not in with_head]
    return declared + [dataclasses.replace(route, method="HEAD") for route in readable]
