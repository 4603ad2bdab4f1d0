"""The simulated device's answers to what is measured: no clock, no noise, the same every time.

`runner` asks here instead of timing where a device is `simulated`. Rows have the columns of
measured ones, so that cost models train on them unchanged; their device, their hardware and
every model's costs that comes of them say that they are simulated.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from autoshard.cost_models.device_specs import DeviceSpec, find_device_spec
from autoshard.cost_models.simulated import SIMULATION_VERSION, SimulatedCostModel
from autoshard.features import shard_features
from autoshard.measure.collective_ranks import CollectiveTiming
from autoshard.measure.config import CacheState, MeasureConfig
from autoshard.measure.environment import Environment
from autoshard.measure.recording import now, timing_columns
from autoshard.measure.references import REFERENCE_KERNELS, reference_columns
from autoshard.measure.repetition import Repetitions
from autoshard.measure.sampling import ShardSet
from autoshard.measure.traffic_sampling import Traffic
from autoshard.problem import TrainingConfig
from autoshard.shards import ShardSlice

#: Every kernel of the simulation starts with an empty cache.
CACHE = CacheState.COLD
BACKEND = "simulated"


def simulated_model(config: MeasureConfig) -> SimulatedCostModel:
    """What answers in place of a device.

    Raises:
        ArtifactError: there is no such simulated device.
    """
    spec = find_device_spec(config.simulated_device)
    return SimulatedCostModel(spec=spec, optimizer=config.kernels.optimizer)


def simulated_environment(spec: DeviceSpec) -> Environment:
    """The spec as hardware and the formulas as software: the same on every machine."""
    facts = {name: value for name, value in spec.to_json().items() if name != "name"}
    return Environment(
        hardware={"simulated_device": spec.name, **facts},
        software={"simulation": SIMULATION_VERSION},
    )


def simulate_shard_set(model: SimulatedCostModel, drawn: ShardSet) -> dict[str, Any]:
    """The columns that a timing of one shard set fills.

    Args:
        model: of the device.
        drawn: what the rank holds, and for how many samples and ranks.
    """
    times_ms, num_kernels = _kernel_ms(model, drawn.slices, drawn.batch_size, drawn.world_size)
    references_ms = [
        time_ms
        for reference in REFERENCE_KERNELS.values()
        for time_ms in _kernel_ms(model, reference.slices, reference.num_samples, 1)[0]
    ]
    return {
        **_ONCE,
        **timing_columns("fwd", _exactly(times_ms[0])),
        **timing_columns("bwd", _exactly(times_ms[1])),
        "fwd_wall_ms": times_ms[0],
        "bwd_wall_ms": times_ms[1],
        "num_kernels": num_kernels,
        "build_ms": 0.0,
        **reference_columns(references_ms),
        "measured_at": now(),
        "worker": 0,
        "pinned": False,
    }


def simulate_collectives(
    model: SimulatedCostModel, traffics: Iterable[Traffic]
) -> Generator[tuple[Traffic, CollectiveTiming], None, None]:
    """Each all-to-all with its time; nobody waits for anybody."""
    for traffic in traffics:
        transfer_ms = float(model.collective_ms(traffic.features()[None])[0])
        yield (
            traffic,
            CollectiveTiming(transfer=_exactly(transfer_ms), wait_ms=0.0, **_ONCE),
        )


#: One computation is as good as many, and needs no warm-up: the columns count it once.
_ONCE: dict[str, Any] = {"iterations": 1, "warmup_iterations": 1, "reached_target": True}


def _exactly(time_ms: float) -> Repetitions:
    """A time without spread."""
    return Repetitions(
        median_ms=time_ms, p20_ms=time_ms, p80_ms=time_ms, min_ms=time_ms, relative_error=0.0
    )


def _kernel_ms(
    model: SimulatedCostModel, slices: Sequence[ShardSlice], batch_size: int, world_size: int
) -> tuple[list[float], int]:
    """Forward and backward of one set, and how many TBEs it takes."""
    training = TrainingConfig(batch_size=batch_size, optimizer=model.optimizer)
    sums_1D = model.encode(shard_features(slices, training, world_size)).sum(axis=0)[None]
    times_ms = model.compute_ms(sums_1D, np.array([len(slices)]))[0]
    return times_ms.tolist(), int(model.num_tbes(sums_1D)[0])
