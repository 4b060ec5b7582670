"""Comparisons of pipeline versions know final labels, and answers that stages wrote are no outcomes of their tasks.

The DDL is in the folder of the same name.
"""

from __future__ import annotations

from alembic import op

from rftdata.postgres.database import run_folder

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_folder(op.get_bind(), __file__)


def downgrade() -> None:
    raise NotImplementedError("facts are never dropped: restore a back-up instead")
