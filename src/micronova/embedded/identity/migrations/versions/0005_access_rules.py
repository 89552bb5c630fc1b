"""Access rules of application credentials."""

from alembic import op

from micronova.embedded.identity.tables import access_rules, application_credential_rules

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the tables unless the first revision, which is the metadata as it is now, has made them."""
    access_rules.create(op.get_bind(), checkfirst=True)
    application_credential_rules.create(op.get_bind(), checkfirst=True)
