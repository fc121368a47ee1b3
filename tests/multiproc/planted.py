"""Entries for ranks that misbehave on purpose; named by module and function, imported in the rank."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from meshwright.run import loop
from meshwright.run.worker import run_rank


def extra_all_reduce(run_dir, listener):
    """A rank that reduces something more in every step."""
    honest = loop.update

    def update(session, lr):
        dist.all_reduce(torch.zeros(3), group=session.ranks.group("dp_replicate"))
        return honest(session, lr)

    loop.update = update
    return run_rank(run_dir, listener)


def extra_broadcast_once(run_dir, listener):
    """A rank that broadcasts once, on a group that no axis owns, in the third step."""
    honest = loop.update

    def update(session, lr):
        if session.step == 2:
            dist.broadcast(torch.zeros(5, dtype=torch.float64), 0, group=dist.new_group())
        return honest(session, lr)

    loop.update = update
    return run_rank(run_dir, listener)


def killed_in_step_three(run_dir, listener):
    """Rank 1 is killed, as by the kernel, in the middle of its third step."""
    honest = loop.forward_backward

    def forward_backward(session, samples, divisor):
        if session.step == 2 and session.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(session, samples, divisor)

    loop.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def raises_in_step_three(run_dir, listener):
    """Rank 1 meets an exception of its own."""
    honest = loop.forward_backward

    def forward_backward(session, samples, divisor):
        if session.step == 2 and session.ranks.rank == 1:
            raise RuntimeError("the cat sat on the keyboard")
        return honest(session, samples, divisor)

    loop.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def nan_in_step_three(run_dir, listener):
    """One rank's weights turn into NaN."""
    honest = loop.forward_backward

    def forward_backward(session, samples, divisor):
        if session.step == 2:
            with torch.no_grad():
                session.model.norm.weight.fill_(float("nan"))
        return honest(session, samples, divisor)

    loop.forward_backward = forward_backward
    return run_rank(run_dir, listener)
