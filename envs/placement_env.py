"""The placement environment for Gymnasium: one table slice, one rank at a time.

Slices come in descending predicted cost; the action is the rank of the current one. See
`docs/environment.md` for the protocol and `envs.episodes` for the rules of an episode.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.protocols import CostModel
from envs.episodes import EnvConfig, Episodes, action_space, observation_space
from envs.task_source import TaskSource

ObservationDict = dict[str, NDArray]


class PlacementEnv(gymnasium.Env[ObservationDict, np.int64]):
    """Place one task's slices. Registered as `autoshard/Placement-v0`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self, tasks: TaskSource, cost_model: CostModel, config: EnvConfig | None = None
    ) -> None:
        """Set up; nothing is drawn before `reset`.

        Args:
            tasks: where episodes get their tasks.
            cost_model: the model that the tasks were prepared with.
            config: sizes and reward.
        """
        self._tasks, self._cost_model = tasks, cost_model
        self.config = config or EnvConfig()
        self.observation_space = observation_space(self.config)  # type: ignore[assignment]
        self.action_space = action_space(self.config)
        self.render_mode = None
        self._episodes: Episodes | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObservationDict, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the task source's draws; the stream goes on if None.
            options: `{"task": PlacementTask}` plays that task instead of a drawn one.

        Returns:
            The observation, and an info with `reference_ms`, `num_slices`, `world_size` and
            `infeasible` (the very first slice fits nowhere; any action then ends the episode).

        Raises:
            InputError: an unknown option, or a task beyond the environment's sizes.
        """
        super().reset(seed=seed)
        options = options or {}
        if unknown := sorted(set(options) - {"task"}):
            raise InputError("unknown reset option", got=unknown, allowed="task")
        task = options["task"] if "task" in options else self._tasks.sample(self.np_random)
        if self._episodes is None:
            self._episodes = Episodes([task], self._cost_model, self.config)
        else:
            self._episodes.start(0, task)
            self._episodes.observe()
        info = {
            "reference_ms": float(self._episodes.reference_ms_N[0]),
            "num_slices": task.num_slices,
            "world_size": task.world_size,
            "infeasible": not self._episodes.observation.legal_NR[0].any(),
        }
        return self._observation(self._episodes), info

    def step(
        self, action: np.int64 | int
    ) -> tuple[ObservationDict, float, bool, bool, dict[str, Any]]:
        """Place the current slice on rank `action`.

        Returns:
            The observation (zeros once the episode has ended), the reward, whether the episode
            has ended, False (nothing is ever truncated), and an info as described in
            `envs.episodes.Episodes.step`.

        Raises:
            InputError: there is no episode to go on with.
        """
        if self._episodes is None or self._episodes.ended_N[0]:
            raise InputError("there is no running episode", remedy="call reset() first")
        result = self._episodes.step(np.array([int(action)]))
        self._episodes.observe()
        return (
            self._observation(self._episodes),
            float(result.reward_N[0]),
            bool(result.ended_N[0]),
            False,
            result.infos[0],
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """The ranks that the current slice may go to, bool [max_ranks] (for sb3-contrib)."""
        if self._episodes is None:
            raise InputError("there is no running episode", remedy="call reset() first")
        return self._episodes.observation.legal_NR[0].copy()

    @staticmethod
    def _observation(episodes: Episodes) -> ObservationDict:
        seen = episodes.observation
        return {
            "ranks": seen.ranks_NRK[0].reshape(-1).copy(),
            "globals": seen.globals_NG[0].copy(),
            "action_mask": seen.legal_NR[0].astype(np.int8),
        }
