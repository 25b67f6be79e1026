"""FrozenLake as a conversation: gymnasium's environment behind text, for multi-turn rollouts.

Owns the starts, the words, what a turn says, how a reply is read, and the reward. Promises that a game is
deterministic (the ice is not slippery), that every text uses only `WORDS`, and that the reward lies in [0, 1]
and is 1 exactly when the goal was reached. Never talks to a model and knows no token ids.

The reward is 1 when the goal is reached, else 0.5 x the best progress, which is the fraction of the shortest
safe path that was covered. Without this shaping a random group's rewards would mostly be equal, and GRPO
would learn nothing. A reply that is no move earns nothing and costs its turn. With an extra reward for the
format, one of the two seeds tried stayed at 0.33 without reaching the goal after 45 steps.
"""

from collections import deque
from typing import Any, cast

import gymnasium

MOVES = ("left", "down", "right", "up")
"""Gymnasium's action order."""
MAX_TURNS = 8
PROGRESS_WEIGHT = 0.5

_OFFSETS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_KINDS = {"S": "start", "F": "ice", "H": "hole", "G": "goal"}
_LAKE = "FFFF FHFH FFFH HFFG".replace(" ", "")
"""Gymnasium's own lake, without its start."""
_SIZE = 4
CELLS = tuple(f"r{row}c{column}" for row in range(_SIZE) for column in range(_SIZE))
STARTS = ("r0c0", "r0c2", "r0c3", "r2c0")
"""The cells in which games begin: the goal is four to six safe steps away."""

INSTRUCTIONS = (
    "you are on a lake . walk to the goal . the lake is a square , every cell is start , ice , hole or "
    "goal . when you walk to the goal you win and the game is over . when you walk to a hole you lose and"
    " the game is over . ice is safe , start is safe , a hole is not safe . every turn you say one move :"
    " left , down , right or up . when you say not one move the turn is lost . when you walk to the wall "
    "you are at the cell you are on now . when the last turn is over you lose . the lake now : "
)
_GAME_WORDS = ("row", "moved", "none")
WORDS = tuple(dict.fromkeys([*MOVES, *_KINDS.values(), "wall", *CELLS, *_GAME_WORDS, *INSTRUCTIONS.split()]))


def _next_cell(cell: int, move: str) -> int | None:
    """Returns where a move leads, None at the wall."""
    down, right = _OFFSETS[move]
    row, column = cell // _SIZE + down, cell % _SIZE + right
    return row * _SIZE + column if 0 <= row < _SIZE and 0 <= column < _SIZE else None


def _distances_to_goal() -> dict[int, int]:
    """Returns the number of steps from each cell to the goal along the shortest path without holes."""
    distances = {_LAKE.index("G"): 0}
    frontier = deque(distances)
    while frontier:
        cell = frontier.popleft()
        for move in MOVES:
            near = _next_cell(cell, move)
            if near is not None and _LAKE[near] != "H" and near not in distances:
                distances[near] = distances[cell] + 1
                frontier.append(near)
    return distances


_DISTANCES = _distances_to_goal()


def parse_move(reply: str) -> str | None:
    """Returns the move that ``reply`` begins with, None when its first word is no move.

    With a move accepted anywhere in the reply, runs stayed near 0.22 or reached 0.46 after 40 steps: then the
    move need not follow the cell, which is what it depends on.
    """
    first = reply.split(maxsplit=1)[:1]
    return first[0] if first and first[0] in MOVES else None


class FrozenLakeGame:
    """One trajectory, which begins in a cell of `STARTS`. Not thread-safe; owned by whoever plays it."""

    def __init__(self, start: str) -> None:
        self.start = start
        self.num_turns = 0
        self.is_done = self.is_success = False
        self._cell = CELLS.index(start)
        self._lake = f"{_LAKE[: self._cell]}S{_LAKE[self._cell + 1 :]}"
        self._start_distance = self._best_distance = _DISTANCES[self._cell]
        rows = [self._lake[at : at + _SIZE] for at in range(0, len(_LAKE), _SIZE)]
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(
            "FrozenLake-v1", desc=rows, is_slippery=False, max_episode_steps=MAX_TURNS + 1
        )
        self._env.reset(seed=0)

    def opening(self) -> str:
        """Returns the first prompt: the rules, the lake, where the walker stands."""
        kinds = [_KINDS[kind] for kind in self._lake]
        rows = (" ".join(kinds[at : at + _SIZE]) for at in range(0, len(kinds), _SIZE))
        return f"{INSTRUCTIONS}{' . '.join(f'row {row}' for row in rows)} . {self._situation()}"

    def play(self, reply: str) -> str:
        """Takes the model's reply for this turn; returns what to tell it next, "" when the game is over."""
        if self.is_done:
            raise ValueError(f"the game from {self.start} is over after {self.num_turns} turns")
        self.num_turns += 1
        move = parse_move(reply)
        if move is not None:
            self._walk(move)
        self.is_done = self.is_done or self.num_turns >= MAX_TURNS
        if self.is_done:
            self._env.close()
            return ""
        return f". you moved {move if move is not None else 'none'} . {self._situation()}"

    @property
    def reward(self) -> float:
        """Returns the reward so far, which is final once `is_done`; the module's docstring defines it."""
        if self.is_success:
            return 1.0
        return PROGRESS_WEIGHT * (1.0 - self._best_distance / self._start_distance)

    def _walk(self, move: str) -> None:
        observation, goal_reward, is_terminal, _, _ = self._env.step(MOVES.index(move))
        self._cell = int(observation)
        self._best_distance = min(self._best_distance, _DISTANCES.get(self._cell, self._best_distance))
        self.is_success = cast(float, goal_reward) > 0
        self.is_done = bool(is_terminal)

    def _situation(self) -> str:
        around = " , ".join(f"{move} {self._kind(_next_cell(self._cell, move))}" for move in MOVES)
        # The cell comes last: what to do depends on it most, and a tiny model sees the last token best.
        return f"{around} . now you are at {CELLS[self._cell]}"

    def _kind(self, cell: int | None) -> str:
        return _KINDS[self._lake[cell]] if cell is not None else "wall"
