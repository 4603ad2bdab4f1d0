"""Runs a case: builds its contenders, checks that they agree, times them in turns.

A contender that raises, dies, falls silent or computes other numbers costs its own
result and no more: the processes are started anew and the run goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard.errors import WorkerError
from autoshard.plan import ShardingPlan
from benchmarks.runtime_speed.cases import make_plan, write_case
from benchmarks.runtime_speed.comparisons import (
    Case,
    Comparison,
    Failure,
    is_foreign,
    one_line,
)
from benchmarks.runtime_speed.sides import Side, SideError
from benchmarks.runtime_speed.statistics import median_ms

WORLD_SIZE = 2
_SEED = 1
_CHECK_STEPS = 3
#: Contenders whose steps take longer do fewer of them.
_SLOW_MS = 100.0
#: Of the outputs' scale; fp32 sums in another order.
_TOLERANCE = 1e-4
#: Steps under the profiler, and before it.
_PROFILE_STEPS, _PROFILE_WARMUP = 30, 5


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure."""

    rounds: int
    steps: int
    """Of a contender in a round."""
    slow_steps: int
    """The same for contenders whose steps take very long, and in the first round."""


class Note(Protocol):
    """Tells the user."""

    def __call__(self, text: str, lasting: bool = False) -> None:
        """Say what is going on; lasting lines are kept where there is no progress bar."""


class ContenderError(WorkerError):
    """A contender raised, died, fell silent or computed other numbers than ours."""

    def __init__(self, contender: str, reason: str, **details: Any) -> None:
        super().__init__(reason, **details)
        self.contender = contender


class Bench:
    """The sides, and how a case is run on them; a context manager."""

    def __init__(self, budget: Budget, torchrec_python: Path | None, note: Note) -> None:
        """Sides start when they are first asked for something.

        Args:
            budget: of each case.
            torchrec_python: interpreter of TorchRec's environment; None to leave it out.
            note: told what is being done, and with True what has been done.
        """
        self._budget = budget
        self._note = note
        self._pythons: dict[str, str | None] = {"autoshard": None}
        if torchrec_python is not None:
            self._pythons["torchrec"] = str(torchrec_python)
        self._sides: dict[str, Side] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; the next request starts them anew."""
        for side in self._sides.values():
            side.close()
        self._sides.clear()

    def describe(self) -> dict[str, Any]:
        """What runs on each side.

        Raises:
            SideError: a side does not start.
        """
        return {name: self._side(name).ask("describe")[0] for name in self._pythons}

    def run(self, case: Case) -> tuple[Comparison | None, list[Failure]]:
        """Compare the contenders of a case.

        Where a contender fails that is not ours, the case is run again without it.

        Returns:
            The comparison of those that finished, None if ours did not; and who failed.
        """
        contenders, failures = list(case.contenders), []
        while True:
            try:
                comparison = self._compare(case, contenders)
            except ContenderError as error:
                self.close()
                failures.append(self._failure(case, error))
                if not is_foreign(error.contender):
                    return None, failures
                contenders.remove(error.contender)
            else:
                self._note(f"{case}: done", True)
                return comparison, failures

    def profile(self, case: Case) -> tuple[dict[str, Any], list[Failure]]:
        """Where each contender's time goes on rank 0, and which of them failed."""
        profiles: dict[str, Any] = {}
        failures = []
        for contender in case.contenders:
            try:
                with self._loaded(case, [contender]):
                    self._ask(
                        contender, "steps", num_steps=_PROFILE_WARMUP, num_warmup=_PROFILE_WARMUP
                    )
                    profiles[contender] = self._ask(contender, "profile", num_steps=_PROFILE_STEPS)[
                        0
                    ]
            except ContenderError as error:
                self.close()
                failures.append(self._failure(case, error))
        return profiles, failures

    def _failure(self, case: Case, error: ContenderError) -> Failure:
        failure = Failure(
            section=case.section,
            model=case.model.name,
            kind=case.kind,
            contender=error.contender,
            reason=one_line(error),
        )
        self._note(f"{case.section}: {failure}", True)
        return failure

    def _compare(self, case: Case, contenders: list[str]) -> Comparison:
        with self._loaded(case, contenders) as folder:
            differences = self._check(contenders, folder)
            rounds = self._rounds(case, contenders)
        return Comparison(
            section=case.section,
            model=case.model.name,
            kind=case.kind,
            ours=contenders[0],
            rounds_ms=rounds,
            largest_difference=differences,
        )

    @contextmanager
    def _loaded(self, case: Case, contenders: list[str]) -> Iterator[Path]:
        """Write the case and build its contenders; afterwards they are dropped again."""
        plan: ShardingPlan = make_plan(case.model, case.kind, WORLD_SIZE, case.optimizer)
        with tempfile.TemporaryDirectory(prefix="runtime-speed-") as name:
            folder = Path(name)
            write_case(folder, case.model, plan, seed=_SEED)
            for contender in contenders:
                self._note(f"{case}: building {contender}")
                self._ask(contender, "load", name=contender, folder=str(folder))
            yield folder
            for contender in contenders:
                self._ask(contender, "drop")

    def _side(self, name: str) -> Side:
        if name not in self._sides:
            self._sides[name] = Side(name, world_size=WORLD_SIZE, python=self._pythons[name])
        return self._sides[name]

    def _ask(
        self,
        contender: str,
        command: str,
        per_rank: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Let a contender's side do something with it."""
        name = "torchrec" if contender.startswith("torchrec/") else "autoshard"
        try:
            return self._side(name).ask(command, per_rank, key=contender, **options)
        except SideError as error:
            raise ContenderError(contender, str(error)) from error

    def _check(self, contenders: list[str], folder: Path) -> dict[str, float]:
        """Train the same steps everywhere; how far others are from the first."""
        outputs: dict[str, list[torch.Tensor]] = {}
        for contender in contenders:
            paths = [folder / f"{contender.replace('/', '-')}-{r}" for r in range(WORLD_SIZE)]
            self._ask(
                contender, "check", [{"path": str(path)} for path in paths], num_steps=_CHECK_STEPS
            )
            outputs[contender] = [
                step for path in paths for step in torch.load(path, weights_only=True)
            ]
        ours = outputs[contenders[0]]
        scale = max(float(step.abs().max()) for step in ours)
        differences = {}
        for contender in contenders[1:]:
            pairs = zip(ours, outputs[contender], strict=True)
            # A tensor's maximum is NaN where there is one; Python's is not.
            worst = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max()) / scale
            if not worst <= _TOLERANCE:
                raise ContenderError(
                    contender,
                    f"it computes other numbers than {contenders[0]}",
                    got=f"a difference of {worst:.2g} of the outputs' scale",
                    allowed=f"at most {_TOLERANCE:g}",
                )
            differences[contender] = worst
        return differences

    def _rounds(self, case: Case, contenders: list[str]) -> dict[str, list[list[float]]]:
        spent: dict[str, list[list[float]]] = {contender: [] for contender in contenders}
        for number in range(self._budget.rounds):
            self._note(f"{case}: round {number + 1} of {self._budget.rounds}")
            # Whoever follows a slow contender finds other caches than whoever follows a
            # fast one: the order turns.
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                # The first round is short: it shows which contenders are slow.
                num_steps = self._budget.slow_steps
                if number and median_ms(spent[contender]) <= _SLOW_MS:
                    num_steps = self._budget.steps
                if case.overlapped:
                    answers = self._ask(contender, "block", num_steps=num_steps)
                else:
                    answers = self._ask(contender, "steps", num_steps=num_steps, num_warmup=2)
                per_rank = [answer["spent_ns"] for answer in answers]
                spent[contender].append([max(step) / 1e6 for step in zip(*per_rank, strict=True)])
        return spent
