"""A GPU that is not there: kernel and all-to-all times from a `DeviceSpec` by a roofline.

Beside the trained models, for scales that no test machine has. What a kernel must move
decides its time: bytes over the memory's bandwidth or bytes over the L2 cache's, whichever
is longer, plus what launching costs. `docs/simulated_device.md` has the formulas, the sources
of every constant and what is left out. Nothing here was calibrated against a real GPU.

Kernels are FBGEMM's table-batched embeddings: a lookup; a backward that sorts the ids and then
updates each touched row once with the fused optimizer.

Shapes: S=shards, N=shard sets, D=encoding width, P=phases (forward, backward), F=shard
features, C=traffic features, K=roofs (memory, L2 cache).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.bounds import makespan_lower_bound
from autoshard.cost_models.device_specs import DEVICE_SPECS, DeviceSpec, find_device_spec
from autoshard.errors import ArtifactError, InputError, quoted
from autoshard.features import NUM_TRAFFIC_FEATURES, SHARD_FEATURES
from autoshard.files import fingerprint
from autoshard.number_text import parse_integer
from autoshard.objective import CostSource
from autoshard.problem import Optimizer, ShardingProblem, parse_optimizer
from autoshard.query_text import parse_query
from autoshard.shards import (
    ID_BYTES,
    KERNEL_ALIGNMENT,
    LENGTH_BYTES,
    OUTPUT_BYTES,
    optimizer_state_bytes,
)

FloatArray = NDArray[np.float64]

#: In front of a spec's name wherever a cost model is chosen: `simulated:a100-80gb`.
SIMULATED_PREFIX = "simulated:"
#: Part of every fingerprint; raised when a formula changes.
SIMULATION_VERSION = 1
#: What memory and L2 move at least (CUDA C++ Best Practices Guide: 32-byte transactions).
SECTOR_BYTES = 32
#: Of a sample's weight, where bags are weighted.
WEIGHT_BYTES = 4
#: FBGEMM sorts pairs of an int64 row and an int32 place (transpose_embedding_input.cu).
PAIR_BYTES = ID_BYTES + 4
#: CUB's one-sweep radix sort takes 8 bits a pass (Adinets and Merrill, arXiv:2206.01784).
RADIX_BITS = 8
#: Kernels of one TBE, counted in FBGEMM's source: bounds check and lookup; and linearize,
#: sort (histogram, scan, passes), run lengths and their sum, segments, two updates.
FORWARD_KERNELS, BACKWARD_KERNELS = 2, 12
#: FBGEMM's GPU kernels take rows up to so many columns.
MAX_COLUMNS = 2048
#: Larger quantities are taken for this one, so that no product overflows.
_LIMIT = 1e200
#: Sums of the bound and of a set are rounded differently: stay this share below.
_ROUNDING = 1e-9
_COLUMN = {name: index for index, name in enumerate(SHARD_FEATURES)}

#: What adds up over the shards of a rank, in bytes unless a count is named. Then follow the
#: shards of each kind of kernel (weighted or not, full or half precision).
ENCODING = (
    "distinct_row_bytes",
    "lookup_row_bytes",
    "forward_stream_bytes",
    "num_rows",
    "num_sorted_pairs",
    "distinct_gradient_bytes",
    "lookup_gradient_bytes",
    "backward_stream_bytes",
)
_NUM_KERNEL_KINDS = 4


@dataclass(frozen=True, kw_only=True)
class SimulatedCostModel:
    """`autoshard.protocols.CostModel` of a simulated device."""

    spec: DeviceSpec
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    """Fused into the backward. Features do not tell it, so the model is of one optimizer."""

    def __post_init__(self) -> None:
        if not isinstance(self.spec, DeviceSpec):
            raise InputError("spec is not usable", got=quoted(self.spec), allowed="a DeviceSpec")
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                "optimizer is not known",
                got=quoted(self.optimizer),
                allowed=", ".join(o.value for o in Optimizer),
            )

    @property
    def name(self) -> str:
        """Such as `simulated:a100-80gb`."""
        return SIMULATED_PREFIX + self.spec.name

    @property
    def source(self) -> CostSource:
        """`SIMULATED`."""
        return CostSource.SIMULATED

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the constants, the optimizer and the formulas."""
        return fingerprint(
            {
                "simulation": SIMULATION_VERSION,
                "spec": self.spec.to_json(),
                "optimizer": self.optimizer.value,
            }
        )

    def encode(self, features_SF: FloatArray) -> FloatArray:
        """What each shard moves, float64 [S, D], columns as in `ENCODING`."""
        bags, lookups, unique_rows = self._counts(features_SF, "fwd")
        update_bags, update_lookups, update_rows = self._counts(features_SF, "bwd")
        reduced = features_SF[:, _COLUMN["reduced_lookups"]]
        by_row = reduced > 0
        # What is sorted with its weights, and what is a sum of gradients that has none.
        weighted = np.where(by_row, reduced, update_lookups)
        sums = np.where(by_row, update_lookups, 0.0)
        # Counts are whole: rounding takes the logarithms' error out, and sums stay exact.
        num_rows, num_cols = (
            np.rint(np.expm1(features_SF[:, _COLUMN[f"log_{name}"]]))
            for name in ("num_rows", "num_cols")
        )
        is_weighted = features_SF[:, _COLUMN["is_weighted"]] > 0
        is_half = features_SF[:, _COLUMN["is_half_precision"]] > 0
        cols = np.ceil(num_cols / KERNEL_ALIGNMENT) * KERNEL_ALIGNMENT
        row_bytes = _sectors(cols * np.where(is_half, 2, 4))
        gradient_bytes = _sectors(cols * OUTPUT_BYTES)
        per_row, with_column = (optimizer_state_bytes(self.optimizer, 1, c) for c in (0, 1))
        state_bytes = _sectors(per_row + (with_column - per_row) * cols)
        id_bytes = ID_BYTES + WEIGHT_BYTES * is_weighted
        columns = (
            unique_rows * row_bytes,
            np.maximum(lookups, unique_rows) * row_bytes,
            lookups * id_bytes + bags * (LENGTH_BYTES + cols * OUTPUT_BYTES),
            num_rows,
            # Weights are sorted along, by a second sort; sums per row carry none any more.
            sums + weighted * (1 + is_weighted),
            (np.minimum(update_bags, update_lookups) + np.minimum(bags, reduced)) * gradient_bytes,
            (update_lookups + reduced) * gradient_bytes,
            (update_lookups + reduced) * PAIR_BYTES
            + weighted * WEIGHT_BYTES * is_weighted
            + update_bags * LENGTH_BYTES
            + np.where(by_row, unique_rows * gradient_bytes, 0.0)
            + 2 * update_rows * (row_bytes + state_bytes),
        )
        kind_S = is_weighted + 2 * is_half
        kinds_SK = kind_S[:, None] == np.arange(_NUM_KERNEL_KINDS)
        return np.hstack([np.minimum(np.stack(columns, axis=1), _LIMIT), kinds_SK])

    @staticmethod
    def _counts(features_SF: FloatArray, phase: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bags, lookups and distinct rows of a phase, [S] each."""
        bags, lookups, unique_rows = (
            features_SF[:, _COLUMN[f"{phase}_{name}"]]
            for name in ("bags", "lookups", "unique_rows")
        )
        return bags, lookups, unique_rows

    def compute_ms(
        self, encoding_sum_ND: FloatArray, num_shards_N: NDArray[np.int64]
    ) -> FloatArray:
        """Launches plus the longer roof of each stage, float64 [N, 2]; 0 for an empty set."""
        encoding_ND = np.asarray(encoding_sum_ND, dtype=np.float64)
        lookup_KN, sort_KN, update_KN = self._roofs_ms(encoding_ND)
        work_NP = np.stack(
            [lookup_KN.max(axis=0), sort_KN.max(axis=0) + update_KN.max(axis=0)], axis=1
        )
        cost_NP = work_NP + self._launches_ms(encoding_ND)
        return np.where(np.asarray(num_shards_N)[:, None] > 0, cost_NP, 0.0)

    def collective_ms(self, traffic_NC: FloatArray) -> FloatArray:
        """Latency plus the busiest rank's bytes over the slower of its two links, float64 [N]."""
        traffic_NC = np.asarray(traffic_NC, dtype=np.float64).reshape(-1, NUM_TRAFFIC_FEATURES)
        world_size_N, sent_N, received_N, total_N = traffic_NC.T
        cost_N = self._transfer_ms(world_size_N, np.maximum(sent_N, received_N))
        return np.where((total_N > 0) & (world_size_N > 1), cost_N, 0.0)

    def compute_lower_bound_ms(
        self, encoding_SD: FloatArray, world_size: int, base_D: FloatArray | None = None
    ) -> FloatArray:
        """One TBE's launches plus the makespan bound of the tightest choice of roofs, float64 [2].

        A set's roof is never below the sum of its shards' roofs (see `_from_memory`, and the
        passes of the sort, which only grow), nor is a stage below either of its roofs. So for
        every choice of a roof per stage, max_r cost >= launches + base + makespan bound.
        """
        if len(encoding_SD) == 0 and base_D is None:
            return np.zeros(2)
        width = len(ENCODING) + _NUM_KERNEL_KINDS
        base_1D = np.zeros((1, width)) if base_D is None else np.asarray(base_D)[None]
        roofs_S, roofs_1 = self._roofs_ms(np.asarray(encoding_SD)), self._roofs_ms(base_1D)

        def bound_ms(*stages: int) -> float:
            return max(
                float(sum(roofs_1[s][k][0] for s, k in zip(stages, chosen, strict=True)))
                + makespan_lower_bound(
                    sum(roofs_S[s][k] for s, k in zip(stages, chosen, strict=True)), world_size
                )
                for chosen in product(range(2), repeat=len(stages))
            )

        work_P = np.array([bound_ms(0), bound_ms(1, 2)])
        return (work_P + self._launches_ms(base_1D)[0]) * (1 - _ROUNDING)

    def collective_lower_bound_ms(self, total_bytes: float, world_size: int) -> float:
        """The busiest rank sends at least total_bytes / world_size."""
        if total_bytes <= 0 or world_size <= 1:
            return 0.0
        least = self._transfer_ms(
            np.array([float(world_size)]), np.array([total_bytes]) / world_size
        )
        return float(least[0]) * (1 - _ROUNDING)

    def is_extrapolated(self, features_SF: FloatArray, problem: ShardingProblem) -> bool:
        """Whether the formulas do not describe what is asked.

        That is another optimizer; nodes of another width than the spec's; more memory than the
        device has, in a rank or in a shard; or wider rows than FBGEMM's GPU kernels take.
        """
        topology = problem.topology
        nodes_differ = topology.local_world_size != min(
            topology.world_size, self.spec.local_world_size
        )
        cols_S = np.rint(np.expm1(features_SF[:, _COLUMN["log_num_cols"]]))
        bytes_S = np.expm1(features_SF[:, _COLUMN["log_weights_bytes"]])
        return bool(
            problem.training.optimizer is not self.optimizer
            or nodes_differ
            or max(topology.hbm_bytes) > self.spec.hbm_bytes
            or np.any(cols_S > MAX_COLUMNS)
            or np.any(bytes_S > self.spec.hbm_bytes)
        )

    def num_tbes(self, encoding_sum_ND: FloatArray) -> FloatArray:
        """Table-batched kernels that a set with at least one shard needs, float64 [N]."""
        kinds_NK = encoding_sum_ND[:, len(ENCODING) :]
        return np.maximum(np.clip(kinds_NK, 0.0, 1.0).sum(axis=1), 1.0)

    def _roofs_ms(self, encoding_ND: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Lookup, sort and update, each as time of the memory and of the L2, float64 [K, N]."""
        # A search subtracts what it added: a sum may come out a few ulp below 0.
        quantities = np.maximum(encoding_ND[:, : len(ENCODING)], 0.0).T
        rows, row_lookups, forward, num_rows, pairs, gradients, gradient_lookups, backward = (
            quantities
        )
        # As FBGEMM does: keys of floor(log2(rows)) + 1 bits, which is frexp's exponent.
        key_bits = np.frexp(np.maximum(num_rows, 1.0))[1]
        passes = np.ceil(key_bits / RADIX_BITS)
        # Ids are read and pairs written, keys read for the histogram and for the run lengths;
        # each pass reads pairs from one buffer and writes them to the other.
        buffers = pairs * (ID_BYTES + 2 * PAIR_BYTES)
        sorting = pairs * (3 * ID_BYTES + PAIR_BYTES + 2 * PAIR_BYTES * passes)
        return (
            self._stage_ms(rows, row_lookups, forward),
            self._stage_ms(buffers, sorting, 0.0),
            self._stage_ms(gradients, gradient_lookups, backward),
        )

    def _stage_ms(
        self, distinct_N: FloatArray, repeated_N: FloatArray, stream_N: FloatArray | float
    ) -> FloatArray:
        """Time of memory and of L2 for bytes read again and again, and others seen once, [K, N]."""
        repeated_N = np.maximum(repeated_N, distinct_N)
        memory_N = _from_memory(distinct_N, repeated_N, float(self.spec.l2_bytes)) + stream_N
        return np.stack(
            [
                memory_N / self.spec.reached_hbm_bytes_per_ms,
                (repeated_N + stream_N) / self.spec.l2_bytes_per_ms,
            ]
        )

    def _launches_ms(self, encoding_ND: FloatArray) -> FloatArray:
        """Launches of a set's TBEs, float64 [N, 2]."""
        kernels_NP = self.num_tbes(encoding_ND)[:, None] * np.array(
            [FORWARD_KERNELS, BACKWARD_KERNELS]
        )
        return self.spec.first_launch_ms + (kernels_NP - 1) * self.spec.next_launch_ms

    def _transfer_ms(self, world_size_N: FloatArray, busiest_bytes_N: FloatArray) -> FloatArray:
        """An all-to-all whose peers get equal parts: both links work at the same time."""
        spec = self.spec
        peers_N = np.maximum(world_size_N - 1, 1.0)
        remote_share_N = np.maximum(world_size_N - spec.local_world_size, 0.0) / peers_N
        local_ms_N = busiest_bytes_N * (1 - remote_share_N) / spec.local_bytes_per_ms
        remote_ms_N = busiest_bytes_N * remote_share_N / spec.remote_bytes_per_ms
        latency_N = np.where(remote_share_N > 0, spec.remote_latency_ms, spec.local_latency_ms)
        return latency_N + np.maximum(local_ms_N, remote_ms_N)


def _sectors(num_bytes: FloatArray) -> FloatArray:
    """Bytes as memory moves them."""
    return np.ceil(num_bytes / SECTOR_BYTES) * SECTOR_BYTES


def _from_memory(distinct_N: FloatArray, repeated_N: FloatArray, cache_bytes: float) -> FloatArray:
    """Bytes that memory delivers when `distinct_N` bytes are read `repeated_N` bytes' worth.

    The first touch of everything comes from memory. A later one finds it in the cache with
    probability h = min(1, cache / distinct), so that memory delivers h·U + (1 − h)·L of U
    distinct and L >= U repeated bytes. This grows with U and with L, and a union costs no less
    than its parts together: with U = U₁ + U₂ > C it is L + C − C·L/U, where L/U lies between
    the parts' ratios L₁/U₁ and L₂/U₂, both >= 1.
    """
    hit_N = cache_bytes / np.maximum(distinct_N, cache_bytes)
    return hit_N * distinct_N + (1 - hit_N) * repeated_N


def simulated_cost_model(text: str) -> SimulatedCostModel:
    """The model behind `NAME` or `NAME?optimizer=adam&local_world_size=4`.

    Args:
        text: what follows `SIMULATED_PREFIX`.

    Raises:
        ArtifactError: there is no such device; names are listed.
        InputError: an option is unknown or not usable.
    """
    name, _, query = text.partition("?")
    spec = find_device_spec(name)
    options = parse_query(query, f"simulated device {name!r}")
    known = ("optimizer", "local_world_size")
    if unknown := sorted(set(options) - set(known)):
        raise InputError(
            f"simulated device {name!r}: unknown option", got=", ".join(unknown), allowed=known
        )
    if "local_world_size" in options:
        try:
            width = parse_integer(options["local_world_size"])
        except ValueError as error:
            raise InputError(
                f"simulated device {name!r}: local_world_size is not usable",
                got=quoted(options["local_world_size"]),
                allowed="a whole number >= 1",
            ) from error
        spec = dataclasses.replace(spec, local_world_size=width)
    if "optimizer" in options:
        return SimulatedCostModel(spec=spec, optimizer=parse_optimizer(options["optimizer"]))
    return SimulatedCostModel(spec=spec)


def refuse_bare_name(text: str) -> None:
    """Refuse a device's name without `SIMULATED_PREFIX`, which would pass for a missing artifact.

    Raises:
        ArtifactError: says how to write it.
    """
    if text in DEVICE_SPECS or text == SIMULATED_PREFIX.rstrip(":"):
        names = [SIMULATED_PREFIX + name for name in DEVICE_SPECS]
        raise ArtifactError(
            f"cost model {text!r} does not exist",
            allowed=", ".join(names),
            remedy="a simulated device is written with its prefix",
        )
