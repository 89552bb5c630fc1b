"""All operations of the identity service, as one list."""

import dataclasses

from micronova.http.service import Route
from micronova.neighbours.identity.api.application_credentials import ApplicationCredentialsAPI
from micronova.neighbours.identity.api.auth import AuthAPI
from micronova.neighbours.identity.api.catalog import EndpointsAPI, RegionsAPI, ServicesAPI
from micronova.neighbours.identity.api.documents import DocumentsAPI
from micronova.neighbours.identity.api.domains import DomainsAPI
from micronova.neighbours.identity.api.grants import GrantsAPI
from micronova.neighbours.identity.api.groups import GroupsAPI
from micronova.neighbours.identity.api.projects import ProjectsAPI
from micronova.neighbours.identity.api.revocations import RevocationsAPI
from micronova.neighbours.identity.api.role_assignments import RoleAssignmentsAPI
from micronova.neighbours.identity.api.roles import RolesAPI
from micronova.neighbours.identity.api.users import UsersAPI
from micronova.neighbours.identity.core import Core


def all_routes(core: Core) -> list[Route]:
    """Return every operation; what can be read can also be asked for with HEAD."""
    resources = (
        AuthAPI, DomainsAPI, ProjectsAPI, UsersAPI, GroupsAPI, RolesAPI, GrantsAPI, RoleAssignmentsAPI,
        ApplicationCredentialsAPI, RegionsAPI, ServicesAPI, EndpointsAPI,
        RevocationsAPI,
    )  # fmt: skip
    declared = DocumentsAPI().routes()
    for resource in resources:
        declared += resource(core).routes()
    with_head = {route.path for route in declared if route.method == "HEAD"}
    readable = [route for route in declared if route.method == "GET" and route.path not in with_head]
    return declared + [dataclasses.replace(route, method="HEAD") for route in readable]
