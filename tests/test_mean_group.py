"""Means over the rows of several processes: every loss with a reduction, against one process that has all rows."""

from test_vocab_parallel import job, run

IN = {"module": "mean_group_cases"}


def test_means_over_a_group(tmp_path):
    failed, printed = run(
        tmp_path,
        job(1, functions=["every_loss", "every_error"], **IN),
        job(2, functions=["every_loss", "nothing_to_count", "compiled"], **IN),
        job(3, functions=["every_loss"], **IN),
        job(4, functions=["of_a_mesh"], **IN),
    )
    assert not failed, printed
