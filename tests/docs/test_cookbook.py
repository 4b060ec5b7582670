"""The questions of docs/cookbook.md: each is shown with an answer, runs, and has the columns that the page shows."""

from __future__ import annotations

from rftdata import Buffer
from scripts.cookbook_answers import PAGE, QUESTION
from tests.store.attempts.test_sampling import draw, stored

QUESTIONS = {
    found[1]: (found[2], found[3].splitlines()) for found in QUESTION.finditer(PAGE.read_text(encoding="utf-8"))
}
# These ask for what the run below has.
ANSWERED = (
    "Which checkpoints were trained on something that was corrected later?",
    "What did people and programs relabel?",
    "How old were the experiences that each step trained on?",
    "What did one step train on?",
)


def test_every_question_runs_and_has_the_columns_of_its_answer(buffer: Buffer) -> None:
    assert len(QUESTIONS) == 20
    roles = stored(buffer, 4)
    with roles.attempt() as attempt:
        draw(attempt, 1, 2)
    buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1")
    for title, (question, shown) in QUESTIONS.items():
        answer = buffer.sql(question)
        assert answer.column_names == shown[0].split(), title
        assert len(shown) > 2, f"{title}: the page shows no answer"
        assert answer.num_rows or title not in ANSWERED, title
    assert set(ANSWERED) <= set(QUESTIONS)
