"""Rewards with the mistakes of a first hour."""


def misspelt(turn, task):
    return float(turn.responze == task.answer)


def no_number(turn, task):
    "None, a text, a truth value or NaN, by the first digit of the sum."
    wrong = [None, "1.0", turn.response == task.answer, float("nan")]
    return wrong[int(task.prompt[0]) % len(wrong)]
