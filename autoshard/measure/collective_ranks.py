"""The ranks' side of measuring collectives: what each process of a group runs.

Every iteration starts with a barrier, so that ranks arrive together as well as the
machine allows; then each rank stamps its arrival, exchanges, and stamps its end, all by
the one monotonic clock of the host. The barrier itself is not part of any time. What a
collective puts out is compared with arithmetic before it is timed, and once more after.

Shapes: R=ranks, I=iterations.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from autoshard.errors import listed
from autoshard.measure.collective_operations import Operation, fill_input
from autoshard.measure.config import CollectiveConfig, TimingConfig
from autoshard.measure.environment import pin_to_core
from autoshard.measure.repetition import NS_PER_MS, Repetitions, is_settled, reached_target
from autoshard.measure.traffic_sampling import Traffic
from autoshard.measure.workers import START_LIMIT_S
from autoshard.runtime.capabilities import Device
from autoshard.runtime.gloo_threads import keep_from_preempting, receiving_threads

#: What rows depend on beside the configuration: a folder with rows of another is not continued.
PROCEDURE = {"gloo_receives": "without preempting", "finished_ranks": "wait"}
#: Iterations between two decisions whether to go on.
_CHUNK = 8


class Stage(IntEnum):
    """What a rank is doing, for the error when it never ends."""

    STARTING = 0
    CHECKING_SIZES = 1
    WAITING_AT_BARRIER = 2
    BETWEEN_BARRIER_AND_EXCHANGE = 3
    EXCHANGING = 4
    GATHERING_TIMES = 5
    FINISHED = 6


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """What one collective took."""

    transfer: Repetitions
    """From the last rank's arrival to the last rank's end."""
    wait_ms: float
    """Median of the last rank's arrival less the first's."""
    iterations: int
    warmup_iterations: int
    reached_target: bool

    @classmethod
    def of(
        cls,
        arrival_ns_IR: NDArray[np.int64],
        end_ns_IR: NDArray[np.int64],
        timing: TimingConfig,
    ) -> CollectiveTiming:
        """Sum up the stamps of all ranks."""
        last_I = arrival_ns_IR.max(axis=1)
        transfer_ms_I = (end_ns_IR.max(axis=1) - last_I) / NS_PER_MS
        wait_ms_I = (last_I - arrival_ns_IR.min(axis=1)) / NS_PER_MS
        return cls(
            transfer=Repetitions.of(transfer_ms_I),
            wait_ms=float(np.median(wait_ms_I)),
            iterations=len(transfer_ms_I),
            warmup_iterations=timing.warmup_iterations,
            reached_target=reached_target([transfer_ms_I.tolist()], timing),
        )


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What every rank is started with."""

    world_size: int
    """Processes; smaller groups are made of the first ones."""
    store_path: str
    """A file in which the ranks find each other."""
    config: CollectiveConfig
    traffics: tuple[Traffic, ...]
    """What to measure, largest groups first."""
    cores: tuple[int, ...]
    arrival_delay_ms: tuple[float, ...] = ()
    """How long each rank dawdles between barrier and arrival; for tests of the clockwork."""


def rank_main(rank: int, setup: RankSetup, stages: Any, connection: Connection) -> None:
    """Measure as rank number `rank`; rank 0 sends (position, timing), every rank its end.

    Args:
        rank: of this process.
        setup: the same for all ranks.
        stages: shared int64 [2 · world_size]: each rank's `Stage` and item.
        connection: to the parent, which is to end the process.
    """
    try:
        _Rank(rank, setup, stages, connection).run()
        stages[2 * rank] = Stage.FINISHED
        connection.send(("finished", None))
        # Leaving keeps a core busy for about a second, in which others would be timed: wait
        # for the parent, which ends everybody when all are through.
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
    except BrokenPipeError:
        return
    except BaseException:
        # The peers fail too, but only once this process is gone: the first stamp is the cause.
        connection.send(("failed", (time.monotonic_ns(), traceback.format_exc())))
        raise SystemExit(1) from None


class _Rank:
    def __init__(self, rank: int, setup: RankSetup, stages: Any, connection: Connection) -> None:
        self.rank, self.setup = rank, setup
        self._stages, self._connection = stages, connection
        self._enter(Stage.STARTING, 0)
        on_cpu = setup.config.device is Device.CPU
        pin_to_core(setup.cores[rank % len(setup.cores)])
        torch.set_num_threads(1)
        self._device = torch.device("cpu" if on_cpu else f"cuda:{rank}")
        if not on_cpu:
            torch.cuda.set_device(self._device)
        # The parent's limit comes first, since it knows what every rank is doing.
        limit = timedelta(seconds=2 * setup.config.item_time_limit_s)
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=f"file://{setup.store_path}",
            rank=rank,
            world_size=setup.world_size,
            timeout=timedelta(seconds=START_LIMIT_S),
        )
        sizes = sorted({traffic.world_size for traffic in setup.traffics})
        self._groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
        # As the runtime does, which runs what is measured here.
        keep_from_preempting(receiving_threads())
        counts = [t.num_elements(rank) for t in setup.traffics if rank < t.world_size]
        self._given = torch.empty(max(given for given, _ in counts), device=self._device)
        self._taken = torch.zeros(max(taken for _, taken in counts), device=self._device)
        fill_input(self._given, rank)

    def run(self) -> None:
        """Measure everything that this rank is part of."""
        for position, traffic in enumerate(self.setup.traffics):
            if self.rank >= traffic.world_size:
                break  # only smaller groups follow
            timing = self._measure(position, traffic)
            if self.rank == 0:
                self._connection.send(("timed", (position, timing)))

    def _enter(self, stage: Stage, position: int) -> None:
        self._stages[2 * self.rank], self._stages[2 * self.rank + 1] = stage, position

    def _measure(self, position: int, traffic: Traffic) -> CollectiveTiming:
        group = self._groups[traffic.world_size]
        operation = Operation(traffic, self.rank, self._given, self._taken, group)
        self._enter(Stage.CHECKING_SIZES, position)
        self._check_sizes(group, operation)
        operation.spoil()
        timing = self.setup.config.timing
        for _ in range(timing.warmup_iterations):
            self._exchange(position, group, operation)
        operation.check()
        stamps = np.empty((0, traffic.world_size, 2), dtype=np.int64)
        chunk = timing.min_iterations
        while True:
            mine = [self._exchange(position, group, operation) for _ in range(chunk)]
            self._enter(Stage.GATHERING_TIMES, position)
            stamps = np.concatenate([stamps, self._gather(group, mine, traffic.world_size)])
            result = CollectiveTiming.of(stamps[..., 0], stamps[..., 1], timing)
            # All ranks see the same stamps, and so come to the same decision.
            elapsed_s = float(stamps[..., 1].max() - stamps[..., 0].min()) / 1e9
            transfer = stamps[..., 1].max(axis=1) - stamps[..., 0].max(axis=1)
            if is_settled([transfer.tolist()], elapsed_s, timing):
                operation.check()
                return result
            chunk = min(_CHUNK, timing.max_iterations - len(stamps))

    def _exchange(self, position: int, group: Any, operation: Operation) -> tuple[int, int]:
        """One collective: its arrival and its end on this rank."""
        operation.prepare()
        self._enter(Stage.WAITING_AT_BARRIER, position)
        dist.barrier(group)
        self._enter(Stage.BETWEEN_BARRIER_AND_EXCHANGE, position)
        if self.setup.arrival_delay_ms:
            time.sleep(self.setup.arrival_delay_ms[self.rank] / 1e3)
        self._enter(Stage.EXCHANGING, position)
        arrival_ns = self._now_ns()
        operation.run()
        return arrival_ns, self._now_ns()

    def _now_ns(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()

    def _check_sizes(self, group: Any, operation: Operation) -> None:
        """Unequal sizes would hang or corrupt an exchange: compare them first."""
        to_R, from_R = operation.send_sizes, operation.receive_sizes
        announced = torch.zeros(len(from_R), dtype=torch.int64, device=self._device)
        dist.all_to_all_single(
            announced, torch.tensor(to_R, dtype=torch.int64, device=self._device), group=group
        )
        wrong = torch.tensor([int(announced.tolist() != from_R)], device=self._device)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=group)
        if wrong.item():
            raise RuntimeError(
                f"ranks disagree on the sizes of {operation.traffic}: rank {self.rank} expects "
                f"{listed(from_R)} elements from the ranks and is sent {listed(announced.tolist())}"
            )

    def _gather(
        self, group: Any, mine: list[tuple[int, int]], world_size: int
    ) -> NDArray[np.int64]:
        """Everybody's stamps, int64 [I, R, 2]."""
        stamps = torch.tensor(mine, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(stamps) for _ in range(world_size)]
        dist.all_gather(gathered, stamps, group=group)
        return torch.stack(gathered, dim=1).cpu().numpy()
