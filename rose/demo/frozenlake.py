"""FrozenLake as a conversation: gymnasium's environment behind text, for multi-turn rollouts.

Owns: the levels, the words, what a turn says, how a reply is read, and the reward. Promises: deterministic
(the ice is not slippery), every text uses only `WORDS`, the reward lies in [0, 1] and is 1 exactly when the
goal was reached. Never talks to a model and knows no token ids.

Reward: 1 when the goal is reached, else 0.5 x (best progress), progress being the fraction of the shortest
safe path covered so far. The shaping is what lets a group of random trajectories differ, which is all GRPO
learns from. A reply that is no move earns nothing and costs its turn; with an extra reward for the format one
of the two seeds tried stayed at 0.33, without reaching the goal, after 45 steps.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import gymnasium

MOVES = ("left", "down", "right", "up")
"""Gymnasium's action order."""
MAX_TURNS = 8
PROGRESS_WEIGHT = 0.5

_CELL_WORDS = {"S": "start", "F": "ice", "H": "hole", "G": "goal"}
_OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_LAKE = ("FFFF", "FHFH", "FFFH", "HFFG")
_STARTS = ((0, 0), (0, 2), (0, 3), (2, 0))

INSTRUCTIONS = (
    "you are on a lake . walk to the goal . the lake is a square , every cell is start , ice , hole or "
    "goal . when you walk to the goal you win and the game is over . when you walk to a hole you lose and"
    " the game is over . ice is safe , start is safe , a hole is not safe . every turn you say one move :"
    " left , down , right or up . when you say not one move the turn is lost . when you walk to the wall "
    "you are at the cell you are on now . when the last turn is over you lose . the lake now : "
)
_GAME_WORDS = ("row", "moved", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A lake and where the walk starts."""

    name: str
    rows: tuple[str, ...]


def _level(start: tuple[int, int]) -> Level:
    row, column = start
    rows = list(_LAKE)
    rows[row] = rows[row][:column] + "S" + rows[row][column + 1 :]
    return Level(name=f"start-{row}-{column}", rows=tuple(rows))


LEVELS: tuple[Level, ...] = tuple(_level(start) for start in _STARTS)
"""Gymnasium's own 4x4 lake, entered from cells that are four to six safe steps from the goal."""


def _cell_word(row: int, column: int) -> str:
    return f"r{row}c{column}"


def _all_words() -> tuple[str, ...]:
    cells = [_cell_word(row, column) for row in range(4) for column in range(4)]
    words = [*MOVES, *_CELL_WORDS.values(), "wall", *cells, *_GAME_WORDS, *INSTRUCTIONS.split()]
    return tuple(dict.fromkeys(words))


WORDS = _all_words()


def parse_move(reply: str) -> str | None:
    """The move that ``reply`` begins with, None when its first word is no move; the rest is chatter.

    With a move accepted anywhere in the reply, runs stayed near 0.22 or reached 0.46 after 40 steps; then the
    move need not follow the cell, which is what it depends on.
    """
    first = reply.split(maxsplit=1)[:1]
    return first[0] if first and first[0] in MOVES else None


class FrozenLakeGame:
    """One trajectory. Not thread-safe; owned by whoever plays it."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.num_turns = 0
        self.is_done = False
        self.is_success = False
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(
            "FrozenLake-v1", desc=list(level.rows), is_slippery=False, max_episode_steps=MAX_TURNS + 1
        )
        observation, _ = self._env.reset(seed=0)
        self._position = int(observation)
        self._distances = _distances_to_goal(level.rows)
        self._start_distance = self._distances[self._position]
        self._best_distance = self._start_distance

    def opening(self) -> str:
        """The first prompt: the rules, the lake, where the walker stands."""
        rows = " . ".join(f"row {' '.join(_CELL_WORDS[cell] for cell in row)}" for row in self.level.rows)
        return f"{INSTRUCTIONS}{rows} . {self._situation()}"

    def play(self, reply: str) -> str:
        """Takes the model's reply for this turn; returns what to tell it next, "" when the game is over."""
        if self.is_done:
            raise ValueError(f"game on level {self.level.name} is over after {self.num_turns} turns")
        self.num_turns += 1
        move = parse_move(reply)
        if move is not None:
            self._walk(move)
        if self.num_turns >= MAX_TURNS:
            self.is_done = True
        if self.is_done:
            self._env.close()
            return ""
        return f". you moved {move if move is not None else 'none'} . {self._situation()}"

    @property
    def reward(self) -> float:
        """See the module docstring; final once `is_done`."""
        if self.is_success:
            return 1.0
        return PROGRESS_WEIGHT * (1.0 - self._best_distance / self._start_distance)

    def _walk(self, move: str) -> None:
        observation, goal_reward, is_terminal, _, _ = self._env.step(MOVES.index(move))
        self._position = int(observation)
        distance = self._distances.get(self._position)
        if distance is not None:
            self._best_distance = min(self._best_distance, distance)
        self.is_success = cast(float, goal_reward) > 0
        self.is_done = bool(is_terminal)

    def _situation(self) -> str:
        size = len(self.level.rows[0])
        row, column = divmod(self._position, size)
        around = " , ".join(
            f"{move} {self._neighbour(row + down, column + right)}"
            for move, (down, right) in zip(MOVES, _OFFSETS, strict=True)
        )
        # The cell comes last: what to do depends on it most, and a tiny model sees the last token best.
        return f"{around} . now you are at {_cell_word(row, column)}"

    def _neighbour(self, row: int, column: int) -> str:
        rows = self.level.rows
        if not (0 <= row < len(rows) and 0 <= column < len(rows[0])):
            return "wall"
        return _CELL_WORDS[rows[row][column]]


def _distances_to_goal(rows: tuple[str, ...]) -> dict[int, int]:
    """Steps to the goal along the shortest path without holes, by cell index; absent: unreachable."""
    size = len(rows[0])
    safe = {r * size + c for r, row in enumerate(rows) for c, cell in enumerate(row) if cell != "H"}
    goal = next(r * size + row.index("G") for r, row in enumerate(rows) if "G" in row)
    distances = {goal: 0}
    frontier = deque([goal])
    while frontier:
        cell = frontier.popleft()
        row, column = divmod(cell, size)
        for down, right in _OFFSETS:
            near = (row + down) * size + column + right
            is_inside = 0 <= row + down < len(rows) and 0 <= column + right < size
            if is_inside and near in safe and near not in distances:
                distances[near] = distances[cell] + 1
                frontier.append(near)
    return distances
