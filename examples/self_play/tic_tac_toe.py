"""Tic-tac-toe as text: two players take turns; a move is the number of a free cell.

A board is three lines of cells: `x` and `o` are taken, a digit is a free cell and the move that takes it. X begins.
"""

from __future__ import annotations

from functools import cache

EMPTY = "123456789"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def written(board: str) -> str:
    """Return the three lines of a board, which is a text of nine cells."""
    return "\n".join(board[start : start + 3] for start in (0, 3, 6))


def read(text: str) -> str:
    """Return the board that `written` wrote."""
    return text.replace("\n", "")


def to_move(board: str) -> str:
    """Return the player whose move it is."""
    return "x" if board.count("x") == board.count("o") else "o"


def moves(board: str) -> list[str]:
    """Return the free cells."""
    return [cell for cell in board if cell.isdigit()]


def after(board: str, move: str) -> str:
    """Return the board after a move of the player whose move it is."""
    return board.replace(move, to_move(board))


def winner(board: str) -> str | None:
    """Return the player with three in a line, or None."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c]), None)


def seen(board: str) -> str:
    """Return what the player whose move it is reads: its own sign, and the board."""
    return f"{to_move(board)}\n{written(board)}"


def over(board: str) -> bool:
    """Return whether a player has won, or no cell is free."""
    return winner(board) is not None or not moves(board)


@cache
def value(board: str) -> int:
    """Return the result for the player whose move it is, if both play perfectly: 1 wins, 0 draws, -1 loses."""
    if winner(board) is not None:
        return -1
    return max((-value(after(board, move)) for move in moves(board)), default=0)


@cache
def best_moves(board: str) -> tuple[str, ...]:
    """Return the moves with the best value (minimax)."""
    return tuple(move for move in moves(board) if -value(after(board, move)) == value(board))
