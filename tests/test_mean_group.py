"""Means over the rows of several processes: every loss with a reduction, against one process that has all rows.

Two more cases share the processes of test_vocab_parallel.py.
"""

import forks
from test_vocab_parallel import job, run


def of_cases(*names):
    return [f"mean_group_cases.{name}" for name in names]


@forks.GROUP
def test_means_over_a_group(tmp_path):
    failed, printed = run(
        tmp_path,
        job(1, functions=of_cases("every_loss", "every_error")),
        job(2, functions=of_cases("every_loss", "nothing_to_count")),
        job(3, functions=of_cases("every_loss")),
    )
    assert not failed, printed
