"""What agents need: why a rollout stopped, roles, rewards of turns, evaluations with several answers a question.

The DDL is in the folder of the same name.
"""

from __future__ import annotations

from alembic import op

from rftdata.postgres.migrations import run_folder

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_folder(op.get_bind(), __file__)


def downgrade() -> None:
    raise NotImplementedError("facts are never dropped: restore a backup instead")
