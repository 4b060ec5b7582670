"""A version after the newest, for tests alone: one change of each kind that versions make.

The DDL is in the folder of the same name.
"""

from __future__ import annotations

from alembic import op

from rftdata.postgres.migrations import run_folder

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_folder(op.get_bind(), __file__)


def downgrade() -> None:
    raise NotImplementedError("facts are never dropped: restore a backup instead")
