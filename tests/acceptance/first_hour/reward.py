"""1 for the right sum, and a little for digits."""


def score(turn, task):
    response = turn.response.strip()
    digits = sum(character.isdigit() for character in response)
    return {"right": float(response == task.answer), "digits": 0.2 * digits / max(len(response), 1)}
