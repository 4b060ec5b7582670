"""A stage of five lines that drops responses with questions and prefers short ones."""

from operators.base import drop


def to_the_point(row, cost=0.01):
    if "?" in row["response"]:
        return drop("asks back")
    return {"reward": row["reward"] - cost * row["num_response_tokens"]}


to_the_point.reads = {"response", "reward", "num_response_tokens"}


def endless(row):
    while True:
        pass


endless.reads = {"response"}
