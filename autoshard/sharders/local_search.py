"""Local search on the cost model: moves and swaps off the slowest ranks, kicks when stuck.

Changes are costed by `autoshard.placement_costs`. Memory and "parts of one table on different
ranks" hold at every step.

Shapes: K=candidate changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.placement import PlacementTask
from autoshard.placement_costs import Changes, PlacementCosts
from autoshard.protocols import CostModel
from autoshard.sharders.meter import Meter

#: Candidates costed in one call of the cost model.
CHUNK = 2048
#: A change must gain this share of the objective to count, so that rounding never does.
MIN_GAIN = 1e-9
#: Slices moved at random when no single change helps.
KICK_SIZES = (2, 3, 4)
#: After so many kicks in a row without a better placement the search ends: small problems
#: are exhausted long before their budget. A search of many slices spends the budget first.
MAX_FRUITLESS_KICKS = 200


def _moves(placement: PlacementCosts, source: int) -> Changes:
    """Every slice on `source`, to every other rank."""
    held = np.flatnonzero(placement.rank_S == source)
    others = np.flatnonzero(np.arange(placement.world_size) != source)
    out_K = np.repeat(held, len(others))
    return Changes(
        source_K=np.full(len(out_K), source),
        target_K=np.tile(others, len(held)),
        out_K=out_K,
        in_K=np.full(len(out_K), -1),
    )


def _swaps(placement: PlacementCosts, source: int, generator: np.random.Generator) -> Changes:
    """Slices on `source` against slices elsewhere; a random sample where there are many."""
    held = np.flatnonzero(placement.rank_S == source)
    elsewhere = np.flatnonzero(placement.rank_S != source)
    num = len(held) * len(elsewhere)
    picked = np.arange(num) if num <= 4 * CHUNK else generator.integers(0, num, size=4 * CHUNK)
    out_K = held[picked // max(len(elsewhere), 1)] if num else np.zeros(0, dtype=np.int64)
    in_K = elsewhere[picked % max(len(elsewhere), 1)] if num else np.zeros(0, dtype=np.int64)
    return Changes(
        source_K=np.full(len(out_K), source),
        target_K=placement.rank_S[in_K],
        out_K=out_K,
        in_K=in_K,
    )


def _improve(
    placement: PlacementCosts, changes: Changes, meter: Meter, generator: np.random.Generator
) -> bool:
    """Apply the best change of the first chunk, in random order, that holds a better one."""
    changes = changes.take(np.flatnonzero(placement.legal_K(changes)))
    order = generator.permutation(len(changes))
    for start in range(0, len(changes), CHUNK):
        if not meter.may_go_on():
            return False
        chunk = changes.take(order[start : start + min(CHUNK, meter.remaining)])
        objective_K = placement.objective_K(chunk)
        meter.spend(len(chunk))
        best = int(np.argmin(objective_K))
        if objective_K[best] < placement.objective_ms * (1 - MIN_GAIN):
            placement.apply(chunk, best)
            return True
    return False


def _kick(placement: PlacementCosts, generator: np.random.Generator) -> None:
    """Move a few random slices off the focus ranks, or any, to random legal ranks."""
    for _ in range(int(generator.choice(KICK_SIZES))):
        sources = placement.focus_ranks()
        source = int(generator.choice(sources))
        moves = _moves(placement, source)
        legal = np.flatnonzero(placement.legal_K(moves))
        if len(legal):
            placement.apply(moves, int(generator.choice(legal)))


def local_search(
    task: PlacementTask,
    cost_model: CostModel,
    start: Sequence[int],
    *,
    meter: Meter,
    seed: int,
    target_ms: float | None = None,
) -> tuple[tuple[int, ...], float]:
    """Improve a placement until the budget ends, or `MAX_FRUITLESS_KICKS` in a row gain nothing.

    Args:
        task: the task.
        cost_model: the objective's model.
        start: a rank for each slice, within memory.
        meter: evaluations and time.
        seed: decides the order of candidates and the kicks.
        target_ms: stop at this objective, such as a lower bound.

    Returns:
        The best placement found and its objective, never worse than `start`.
    """
    placement = PlacementCosts(task, cost_model, start)
    best, best_ms = tuple(int(r) for r in placement.rank_S), placement.objective_ms
    if task.world_size == 1:
        return best, best_ms
    generator = np.random.default_rng(seed)
    goal_ms = -np.inf if target_ms is None else target_ms * (1 + MIN_GAIN)
    num_fruitless = 0
    while best_ms > goal_ms and num_fruitless <= MAX_FRUITLESS_KICKS and meter.may_go_on():
        improved = False
        for source in placement.focus_ranks():
            if _improve(placement, _moves(placement, source), meter, generator) or _improve(
                placement, _swaps(placement, source, generator), meter, generator
            ):
                improved = True
                break
        if placement.objective_ms < best_ms * (1 - MIN_GAIN):
            best, best_ms = tuple(int(r) for r in placement.rank_S), placement.objective_ms
            num_fruitless = 0
        if not improved and meter.may_go_on():
            num_fruitless += 1
            placement = PlacementCosts(task, cost_model, best)
            _kick(placement, generator)
            meter.spend(1)  # a stuck search with no legal change still ends
    return best, best_ms
