import math
import operator
import time
from functools import partial

import pytest

from autoshard.errors import WorkerError
from autoshard.measure.workers import run_tasks
from tests.process_cases import Children

# Factories that can be pickled without this module: called with a worker's number, the
# first makes a handler that raises the number to the task's power, the second `exec`.
POWERS = partial(partial, math.pow)
EXECUTE = partial(operator.getitem, [exec, exec])


def collect(factory, tasks, **options):
    options = {"num_workers": 2, "time_limit_s": 20.0, **options}
    return list(run_tasks(factory, tasks, **options))


def test_every_task_is_answered_once():
    children = Children()
    answers = collect(POWERS, [float(x) for x in range(20)])
    # Worker 0 computes 0 ** x, worker 1 computes 1 ** x.
    assert sorted(task for task, _ in answers) == [float(x) for x in range(20)]
    assert {answer for _, answer in answers} <= {0.0, 1.0}
    assert not children.new()


def test_no_tasks_start_no_workers():
    assert collect(POWERS, []) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import time; time.sleep(600)", "did not answer in time"),
        ("raise SystemExit(4)", "exited with code 4"),
    ],
)
def test_failures_end_the_run_with_their_cause(code, message):
    children = Children()
    answers = run_tasks(EXECUTE, ["1", code], num_workers=1, time_limit_s=2.0)
    assert next(answers) == ("1", None)
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        next(answers)
    assert message in str(caught.value)
    assert time.monotonic() - start < 40.0
    assert not children.new()
