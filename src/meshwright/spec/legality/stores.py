"""Rules of ``[checkpoint]``: the stores and their quorum."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.core.object_path import SCHEMES, is_url
from meshwright.core.units import format_plural
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule


def check_urls(job: Job) -> Problem | None:
    """A store is a folder, or a URL of a kind that is supported."""
    stores = (
        ("checkpoint.dir", job.checkpoint.dir),
        *(("checkpoint.stores", s) for s in job.checkpoint.stores),
    )
    for path, store in stores:
        scheme, _, rest = (store or "").partition("://")
        if store is not None and is_url(store) and (scheme not in SCHEMES or not rest.partition("/")[0]):
            fix = "Write s3://BUCKET/PREFIX, or a folder"
            return Problem("store-url", "is not the URL of an object store", path=path, value=store, fix=fix)
    return None


def check_distinct(job: Job) -> Problem | None:
    """Two copies in one place are one copy."""
    stores = [
        store.rstrip("/") for store in (job.checkpoint.dir, *job.checkpoint.stores) if store is not None
    ]
    twice = next((store for store in stores if stores.count(store) > 1), None)
    if twice is None:
        return None
    rule, fix = "names a store twice", "Name each folder or prefix once, checkpoint.dir included"
    return Problem("checkpoint-store-twice", rule, path="checkpoint.stores", value=twice, fix=fix)


def check_quorum(job: Job) -> Problem | None:
    """A quorum of more stores than there are is never reached."""
    count = 1 + len(job.checkpoint.stores)
    if job.checkpoint.quorum <= count:
        return None
    rule = f"is more than the job has: {format_plural(count, 'store')}, checkpoint.dir included"
    fix = f"Use at most {count}, or 0 for more than half"
    return Problem("checkpoint-quorum", rule, path="checkpoint.quorum", value=job.checkpoint.quorum, fix=fix)


RULES = (
    Rule("store-url", "`checkpoint.dir` and `checkpoint.stores` are folders or `s3://` URLs.", check_urls),
    Rule(
        "checkpoint-store-twice",
        "`checkpoint.stores` names each store once, and not `checkpoint.dir`.",
        check_distinct,
    ),
    Rule("checkpoint-quorum", "`checkpoint.quorum` is at most the number of stores.", check_quorum),
)
