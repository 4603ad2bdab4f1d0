"""Breaks the runtime on purpose, one line at a time, and checks that tests notice.

    python -m tests.mutations                # all, about twenty minutes on 2 busy cores
    python -m tests.mutations --only sliced  # those of files whose name contains it

Every mutation is applied to a copy of the checkout in a temporary folder, never to the
checkout itself. One that no test notices makes the exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).absolute().parents[1]
_LEFT_OUT = shutil.ignore_patterns(".*", "outputs", "multirun", "*.egg-info", "__pycache__")
_TIME_LIMIT_S = 300
_EQUALITY = "tests/distributed/test_runtime_equality.py"
_STEPS = "tests/distributed/test_runtime_steps.py"
_BEHAVIOUR = "tests/distributed/test_runtime_behaviour.py"
_EXCHANGE = "tests/distributed/test_runtime_exchange.py"
_DENSE = "tests/distributed/test_runtime_dense.py"
_PARTS = "tests/unit/test_runtime_parts.py"
_CHECKPOINTS = "tests/distributed/test_training_checkpoints.py"


@dataclass(frozen=True)
class Mutation:
    """One line made wrong."""

    file: str
    """In `autoshard/`."""
    old: str
    """Occurs there once."""
    new: str
    breaks: str
    tests: tuple[str, ...]
    """Where it should be noticed."""


MUTATIONS = (
    Mutation(
        "runtime/sliced.py",
        "torch.div(gradients[entry][:, own], self._context.world_size, out=target)",
        "torch.div(gradients[entry][:, own], 1, out=target)",
        "gradients of slices are not divided by the ranks",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/sliced.py",
        "total.add_(parts_RF[other_rank][other])",
        "total.sub_(parts_RF[other_rank][other])",
        "partial sums of row slices are subtracted",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/sliced.py",
        "slice(shard.col_offset, shard.col_offset + shard.num_cols)",
        "slice(0, shard.num_cols)",
        "every column slice gets the first columns' gradients",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/bag_replicas.py",
        "own.div_(world_size)",
        "own.div_(1)",
        "gradients of replicas by bag are not divided",
        (_EQUALITY, _EXCHANGE),
    ),
    Mutation(
        "runtime/row_replicas.py",
        "torch.stack(list(part)).div_(self._context.world_size)",
        "torch.stack(list(part))",
        "gradients of replicas by row are not divided",
        (_EQUALITY, _EXCHANGE),
    ),
    Mutation(
        "runtime/row_space.py",
        "weights = None if bags.weights_L is None else bags.weights_L[self.order_L]",
        "weights = bags.weights_L",
        "weights stay in the order before the sort",
        (_EQUALITY, _EXCHANGE),
    ),
    Mutation(
        "runtime/node_sliced.py",
        "            total.add_(piece)",
        "            total.copy_(piece)",
        "a node keeps one partial sum instead of their sum",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/kernels.py",
        "self._gradient_scale = math.sqrt(key.padding[0] / key.padding[1])",
        "self._gradient_scale = 1.0",
        "row-wise Adagrad averages over padding columns",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/kernels.py",
        "            learning_rate=training.learning_rate / self._gradient_scale,",
        "            learning_rate=training.learning_rate,",
        "padded tables learn at another rate",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/embeddings.py",
        "of_sums[entry] = gradients[entry] / divisor_B1",
        "of_sums[entry] = gradients[entry]",
        "the backward of means is that of sums",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/embeddings.py",
        "lengths = step.num_ids_EB[self._mean_entries].clamp(min=1)",
        "lengths = step.num_ids_EB[self._mean_entries].clamp(min=2)",
        "bags of one id are halved",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/collectives.py",
        "        pieces[own] = kept",
        "        pieces[own] = torch.zeros_like(kept)",
        "what a rank keeps for itself is lost",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/ids.py",
        "return all(top < rows for",
        "return all(top <= rows for",
        "the first id beyond a small table passes",
        (_PARTS,),
    ),
    Mutation(
        "runtime/ids.py",
        "        if lowest < 0:\n            return False\n",
        "",
        "negative ids pass",
        (_PARTS,),
    ),
    Mutation(
        "runtime/ids.py",
        "batch.lengths_FB.clone() if in_order",
        "batch.lengths_FB if in_order",
        "a loader that refills its tensor changes a step under way",
        (_PARTS,),
    ),
    Mutation(
        "runtime/headers.py",
        "if header.status == Status.FAILED and rank != own_rank:",
        "if False:",
        "a rank's failure does not stop the others",
        ("tests/distributed/test_runtime_loop_data.py", _BEHAVIOUR),
    ),
    Mutation(
        "runtime/input_dist.py",
        "        if any(header.ids_follow for header in headers):",
        "        if header.ids_follow:",
        "only ranks whose own ids did not fit wait for late ones",
        (_EXCHANGE, _STEPS, _BEHAVIOUR),
    ),
    Mutation(
        "runtime/dense_replicas.py",
        "gradients = bucket.buffer().div_(self._group.world_size)",
        "gradients = bucket.buffer()",
        "dense gradients are summed, not averaged",
        (_DENSE,),
    ),
    Mutation(
        "runtime/initialization.py",
        "block[low - start : high - start, col_offset : col_offset + num_cols]",
        "block[low - start : high - start, :num_cols]",
        "column slices start with the first columns' values",
        (_EQUALITY,),
    ),
    Mutation(
        "runtime/kernels.py",
        "return weights.detach()[:, : self._true_T[table]]",
        "return weights.detach().clone()[:, : self._true_T[table]]",
        "checkpoints and initial values go into a copy",
        (_CHECKPOINTS, _EQUALITY),
    ),
)


def is_noticed(mutation: Mutation) -> tuple[bool, str]:
    """Run the mutation's tests on a broken copy; whether one fails, and the last line."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy = Path(name) / "checkout"
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        path = copy / "autoshard" / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            raise SystemExit(
                f"{mutation.file}: a mutation no longer applies: {mutation.old!r} occurs "
                f"{text.count(mutation.old)} times"
            )
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not gpu", *mutation.tests]
        # The copy's packages come before the installed ones: `python -m` puts the working
        # directory first, also for the processes that tests start.
        try:
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=_TIME_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return True, f"no end within {_TIME_LIMIT_S} s"
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
        if done.returncode != 0 and " failed" not in lines[-1]:
            raise SystemExit(f"pytest ended with {done.returncode}: {lines[-1]}")
        return done.returncode != 0, lines[-1].strip("= ")


def main() -> int:
    """Try every mutation; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the file's name")
    only = parser.parse_args().only
    console = Console()
    table = Table("file", "what breaks", "noticed", "s")
    missed = 0
    for mutation in MUTATIONS:
        if only not in mutation.file:
            continue
        start = time.monotonic()
        noticed, last_line = is_noticed(mutation)
        missed += not noticed
        spent = f"{time.monotonic() - start:.0f}"
        console.print(f"{mutation.file}: {mutation.breaks}: {last_line} ({spent} s)")
        table.add_row(mutation.file, mutation.breaks, "yes" if noticed else "NO", spent)
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
