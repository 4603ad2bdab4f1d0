"""One rank of one side: loads contenders and runs their steps when the driver says so.

The same file runs every side, so that pinning, threads, process group, barrier and clock
are equal. Commands come in as JSON lines on standard input and answers leave on what was
standard output; whatever libraries print goes to standard error. Between commands the
process blocks in a read.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol

#: What the name of a contender ends with whose processes have autoshard's setting of gloo's
#: threads (`autoshard.runtime.gloo_threads`) instead of the usual one.
CALM = "+calm"
#: How far ahead the common start lies when the ranks agree on it.
_LEAD_NS = 1_000_000
#: For the last part of it they spin.
_SPIN_NS = 200_000


class Contender(Protocol):
    """One way of doing the training step."""

    def step(self, index: int) -> None:
        """Do step number `index` on the batch with that number, modulo how many there are."""

    def outputs(self) -> Any:
        """The pooled outputs of the last step, float32 [B, C], features in order."""


class BlockContender(Protocol):
    """One way of doing many steps that overlap."""

    def run(self, num_steps: int) -> None:
        """Do `num_steps` steps, the pipeline's filling and draining included.

        Starts at the first batch every time, and goes on with the weights it has.
        """

    def losses(self) -> Any:
        """This rank's loss in every step of the last run, float32 [num_steps]."""


def make_contender(name: str, folder: Path, rank: int) -> Any:
    """Build the contender called `name` for the case in `folder`."""
    side, _, variant = name.partition("/")
    if side == "autoshard":
        from benchmarks.runtime_speed import autoshard_side

        return autoshard_side.make(variant, folder, rank)
    if side == "torchrec":
        from benchmarks.runtime_speed import torchrec_side

        return torchrec_side.make(variant, folder, rank)
    if side == "floor":
        from benchmarks.runtime_speed import floor

        return floor.make(variant, folder, rank)
    from benchmarks.runtime_speed import pytorch_side

    return pytorch_side.make(variant, folder, rank)


class Worker:
    """The commands of one rank; each returns what is sent back."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._contenders: dict[str, Any] = {}

    def load(self, *, name: str, key: str, folder: str) -> dict[str, Any]:
        """Build a contender and keep it under `key`."""
        self._contenders[key] = make_contender(name.removesuffix(CALM), Path(folder), self._rank)
        return {}

    def drop(self, *, key: str) -> dict[str, Any]:
        """Forget a contender."""
        self._contenders.pop(key, None)
        gc.collect()
        return {}

    def check(self, *, key: str, num_steps: int, path: str) -> dict[str, Any]:
        """Train on the first batch again and again; save the outputs of every step.

        Of a `BlockContender`, run the steps in turn and save the losses: a list of one tensor.
        """
        import torch

        contender = self._ready(key)
        if hasattr(contender, "run"):
            contender.run(num_steps)
            torch.save([contender.losses()], path)
            return {}
        outputs = []
        for _ in range(num_steps):
            contender.step(0)
            outputs.append(contender.outputs().detach().clone())
        torch.save(outputs, path)
        return {}

    def steps(self, *, key: str, num_steps: int, num_warmup: int) -> dict[str, Any]:
        """Run steps, each from a common start; nanoseconds from there to this rank's end."""
        contender = self._ready(key)
        spent = []
        gc.collect()
        gc.disable()
        try:
            for index in range(num_warmup + num_steps):
                start = common_start()
                contender.step(index)
                spent.append(time.monotonic_ns() - start)
        finally:
            gc.enable()
        return {"spent_ns": spent[num_warmup:]}

    def block(self, *, key: str, num_steps: int) -> dict[str, Any]:
        """Run steps without a barrier between them; nanoseconds per step on this rank."""
        contender = self._ready(key)
        gc.collect()
        start = common_start()
        if hasattr(contender, "run"):
            contender.run(num_steps)
        else:
            for index in range(num_steps):
                contender.step(index)
        return {"spent_ns": [(time.monotonic_ns() - start) / num_steps]}

    def profile(self, *, key: str, num_steps: int) -> dict[str, Any]:
        """Where this rank's time goes, by torch's operators."""
        from benchmarks.runtime_speed.profiling import profile_steps

        return profile_steps(self._ready(key), num_steps, common_start)

    def _ready(self, key: str) -> Any:
        """A contender whose setting of gloo's threads holds: all share one process group."""
        from autoshard.runtime import gloo_threads

        if key.startswith("autoshard/"):  # as it decides itself
            gloo_threads.GLOO_THREADS.refresh()
        else:
            gloo_threads.keep_from_preempting(
                gloo_threads.receiving_threads(), enabled=key.endswith(CALM)
            )
        return self._contenders[key]

    def describe(self) -> dict[str, Any]:
        """What runs here."""
        import importlib.metadata

        import torch

        versions = {"python": sys.version.split()[0], "torch": torch.__version__}
        for name in ("fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "numpy"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return {"versions": versions, "threads": torch.get_num_threads(), "cores": cores}


def common_start() -> int:
    """Meet the other ranks and start together; the start by the monotonic clock."""
    import torch
    import torch.distributed as dist

    start = torch.tensor([time.monotonic_ns() + _LEAD_NS])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(start, op=dist.ReduceOp.MAX)
    start_ns = int(start)
    time.sleep(max(0, start_ns - _SPIN_NS - time.monotonic_ns()) / 1e9)
    while time.monotonic_ns() < start_ns:
        pass
    return start_ns


def _serve(worker: Worker, answers: IO[str]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            reply = {"ok": getattr(worker, command)(**request)}
        except Exception as error:
            reply = _failure(error)
        print(json.dumps(reply), file=answers, flush=True)


def _failure(error: Exception) -> dict[str, str]:
    """The answer of a rank that failed: its exception's own text. The trace goes to the log."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}".removesuffix(": ")}


def main() -> None:
    """Join the process group and serve until the driver hangs up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--core", type=int)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = parser.parse_args()
    # Answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _join(arguments)
    except Exception as error:
        print(json.dumps(_failure(error)), file=answers, flush=True)
        sys.exit(1)
    print(json.dumps({"ok": {}}), file=answers, flush=True)
    _serve(Worker(arguments.rank), answers)
    answers.close()
    # Leave without the destructors of process groups, which may wait for peers.
    os._exit(0)


def _join(arguments: argparse.Namespace) -> None:
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=timedelta(seconds=arguments.timeout_s),
    )


if __name__ == "__main__":
    main()
