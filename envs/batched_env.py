"""N placement episodes in lockstep as a Stable-Baselines3 `VecEnv`, in one process.

Every step costs all episodes with one call of the cost model. Episode i of a batch seeded
with s plays what `PlacementEnv` seeded with s + i plays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices

from autoshard.errors import InputError, quoted
from autoshard.protocols import CostModel
from envs.episodes import EnvConfig, Episodes, StepResult, action_space, observation_space
from envs.task_source import TaskSource


class BatchedPlacementEnv(VecEnv):
    """Steps many `PlacementEnv`s as one. An ended episode is followed by a new one at once."""

    def __init__(
        self,
        tasks: TaskSource,
        cost_model: CostModel,
        num_envs: int,
        config: EnvConfig | None = None,
    ) -> None:
        """Set up; nothing is drawn before `reset`.

        Args:
            tasks: where episodes get their tasks.
            cost_model: the model that the tasks were prepared with.
            num_envs: N >= 1.
            config: sizes and reward.
        """
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise InputError(
                "num_envs is not usable", got=quoted(num_envs), allowed="integers >= 1"
            )
        self.config = config or EnvConfig()
        self.render_mode = None
        super().__init__(num_envs, observation_space(self.config), action_space(self.config))
        self._tasks, self._cost_model = tasks, cost_model
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._episodes: Episodes | None = None
        self._pending: StepResult | None = None

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed episode i with seed + i at the next `reset`."""
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        return super().seed(seed)  # type: ignore[return-value]

    def reset(self) -> dict[str, NDArray]:
        """Start N episodes.

        Returns:
            Observations stacked along a first axis of N.
        """
        for index, seed in enumerate(self._seeds):
            if seed is not None or self._generators[index] is None:
                self._generators[index] = seeding.np_random(seed)[0]
        drawn = [self._draw(index) for index in range(self.num_envs)]
        self._episodes = Episodes(drawn, self._cost_model, self.config)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Take one step in every episode."""
        actions = np.asarray(actions, dtype=np.int64).reshape(-1)
        if len(actions) != self.num_envs:
            raise InputError(
                "actions do not match the environments", got=len(actions), allowed=self.num_envs
            )
        self._pending = self._running().step(actions)

    def step_wait(self) -> tuple[dict[str, NDArray], NDArray, NDArray, list[dict[str, Any]]]:
        """Finish the step, start a new episode wherever one has ended.

        Returns:
            Observations, rewards (float32 [N]), endings (bool [N]) and infos; the info of an
            ended episode has its `terminal_observation` (zeros: nothing is left to place).
        """
        episodes, result = self._running(), self._pending
        if result is None:
            raise InputError("no step is under way", remedy="call step_async() first")
        self._pending = None
        for index in np.flatnonzero(result.ended_N):
            info = result.infos[index]
            info["terminal_observation"] = {
                key: np.zeros(space.shape, dtype=space.dtype)
                for key, space in self.observation_space.spaces.items()  # type: ignore[attr-defined]
            }
            info["TimeLimit.truncated"] = False
            episodes.start(int(index), self._draw(int(index)))
        episodes.observe()
        return (
            self._observations(),
            result.reward_N.astype(np.float32),
            result.ended_N,
            result.infos,
        )

    def close(self) -> None:
        """Nothing to close."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute of the batch, once for each episode asked for."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused: episodes of a batch share their attributes."""
        raise InputError(
            f"cannot set {attr_name!r} on episodes of a batch",
            remedy="make a new BatchedPlacementEnv",
        )

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Only `action_masks`, which sb3-contrib asks for."""
        if method_name != "action_masks":
            raise InputError(f"episodes of a batch have no method {method_name!r}")
        masks_NR = self.action_masks()
        return [masks_NR[index] for index in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        """Never."""
        return [False for _ in self._get_indices(indices)]

    def action_masks(self) -> NDArray[np.bool_]:
        """The legal ranks of every episode, bool [N, max_ranks]."""
        return self._running().observation.legal_NR.copy()

    def _get_indices(self, indices: VecEnvIndices) -> Iterable[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else indices

    def _draw(self, index: int) -> Any:
        generator = self._generators[index]
        assert generator is not None  # set by reset
        return self._tasks.sample(generator)

    def _running(self) -> Episodes:
        if self._episodes is None:
            raise InputError("there is no running episode", remedy="call reset() first")
        return self._episodes

    def _observations(self) -> dict[str, NDArray]:
        seen = self._running().observation
        return {
            "ranks": seen.ranks_NRK.reshape(self.num_envs, -1),
            "globals": seen.globals_NG,
            "action_mask": seen.legal_NR.astype(np.int8),
        }
