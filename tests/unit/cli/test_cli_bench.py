"""``meshwright bench collectives``: bad arguments, before any rank starts."""

from __future__ import annotations

import pytest

from meshwright.runs.collective_bench import settle_algorithms


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--ops", "sum"], "collective-op", "--ops='sum' is not a collective operation. Use broadcast"),
        (["--ops", "all_reduce,"], "collective-op", "--ops=''"),
        (["--algorithms", "star"], "collective-algorithm", "--algorithms='star' is not an algorithm of"),
        (
            ["--ops", "all_gather", "--algorithms", "tree"],
            "collective-algorithm",
            "Use backend, naive, ring, recursive_doubling",
        ),
        (["--algorithms", "hierarchical"], "collective-groups", "is missing"),
        (["--ranks", 0], "api-argument", "--ranks=0 must be 2 to 64"),
        (["--ranks", 1], "api-argument", "--ranks=1 must be 2 to 64"),
        (["--sizes", "1kB,3q"], "collective-size", "--sizes='3q'"),
        (["--sizes", "0"], "api-argument", "must be at least 1 byte"),
        (["--sizes", "4000GB"], "api-argument", "needs more than half of the free memory"),
        (["--budget-s", 0], "api-argument", "--budget-s=0.0 must be positive"),
        (["-o", "x.txt"], "picture-kind", "is not a picture"),
        (["-o", "nowhere/x.svg"], "bench-not-writable", "cannot be written"),
    ],
)
def test_bad_arguments_are_refused(cli, arguments, code, says):
    ran = cli("bench", "collectives", *arguments)
    assert ran.status == 2
    assert f"[{code}]" in ran.err
    assert says in " ".join(ran.err.split())


def test_an_operation_has_the_named_algorithms_that_it_knows():
    assert settle_algorithms(["all_reduce", "all_gather"], ["ring", "tree"], 4) == {
        "all_reduce": ["ring", "tree"],
        "all_gather": ["ring"],
    }
    assert settle_algorithms(["all_reduce"], ["backend"], 4) == {"all_reduce": []}
    assert settle_algorithms(["all_gather"], None, 4) == {"all_gather": ["ring"]}
