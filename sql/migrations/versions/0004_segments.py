"""The life of segment files after their writer: closed, retired, removed.

The DDL is in the folder of the same name.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for file in sorted(Path(__file__).with_suffix("").glob("*.sql")):
        # The driver itself: SQLAlchemy would hand over parameters and psycopg then reads % as a placeholder.
        op.get_bind().connection.driver_connection.execute(file.read_text(encoding="utf-8"))


def downgrade() -> None:
    raise NotImplementedError("facts are never dropped: restore a back-up instead")
