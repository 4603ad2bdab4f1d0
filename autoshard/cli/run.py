"""`autoshard run`: execute a plan on this machine, on random batches or to train a model."""

from __future__ import annotations

from autoshard.cli.run_request import RunRequest, command_for
from autoshard.cli.run_views import run_progress, show_run, show_training, training_progress

DEFAULT_TIMEOUT_S = 120.0

DESCRIPTION = """Run a plan with one process per rank, or train a model under it.

Without --data, batches are drawn from the plan's own id distributions, and measured times are
printed beside the predicted ones. With --data, a model is trained and evaluated, and can be
checkpointed and resumed.

For example:

  autoshard run plan.json --steps 20
  autoshard run plan.json --steps 100 --warmup 10 --seed 1 --json
  autoshard run plan.json --data movielens-100k --epochs 3 --out-dir results
  autoshard run plan.json --data "criteo:train.txt.gz?malformed=skip" --eval-every 1000
  autoshard run plan.json --data clicks --checkpoint ckpt --checkpoint-every 500 --resume

Tables for these data sets: workload:movielens_100k, workload:criteo_kaggle. Needs FBGEMM.
"""


def _run_here(request: RunRequest) -> None:
    from autoshard.runtime.signals import ended_in_order

    with ended_in_order():
        if request.training is None:
            from autoshard.runtime.launch import run_plan

            with run_progress(request) as progress:
                result = run_plan(request.plan, options=request.options, progress=progress)
            show_run(request, result)
        else:
            from autoshard.training.launch import train

            with training_progress() as progress:
                trained = train(request.plan, request.training, progress=progress)
            show_training(request, trained)


run_command = command_for(_run_here, DESCRIPTION, default_timeout_s=DEFAULT_TIMEOUT_S)
