"""Logs of tasks that are done once in a period for every host: the audit of usage."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Make the table unless the first revision, which is the metadata as it is now, has made it."""
    op.create_table(
        "task_logs",
        sa.Column("task_name", sa.String(64), primary_key=True),
        sa.Column("period_beginning", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("period_ending", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("host", sa.String(255), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("task_items", sa.Integer, nullable=False),
        sa.Column("errors", sa.Integer, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_index("task_logs_by_period", "task_logs", ["period_ending"], if_not_exists=True)
