"""Entries for ranks that misbehave on purpose; named by module and function, imported in the rank."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwright.run import loop
from meshwright.run.bench import scaling
from meshwright.run.worker import run_rank, run_session

M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


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


def hidden_collectives(run_dir, listener):
    """Collectives by ways that leave autograd out: a functional one, and one in inference mode."""
    honest = loop.update

    def update(session, lr):
        if session.step == 2:
            group = session.ranks.group("dp_replicate")
            functional.all_reduce(torch.zeros(4), "sum", group).sum()
            with torch.inference_mode():
                dist.broadcast(torch.zeros(2), 0, group=group)
        return honest(session, lr)

    loop.update = update
    return run_rank(run_dir, listener)


def infinite_gradient(run_dir, listener):
    """One gradient overflows in the third step; the loss of that step is still fine."""
    honest = loop.update

    def update(session, lr):
        if session.step == 2:
            session.model.norm.weight.grad[0] = float("inf")
        return honest(session, lr)

    loop.update = update
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


def not_deterministic(run_dir, listener):
    """An operation that torch cannot promise to repeat."""
    honest = loop.update

    def update(session, lr):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
        return honest(session, lr)

    loop.update = update
    return run_rank(run_dir, listener)


def cause_and_consequence(run_dir, listener):
    """Rank 1 fails; rank 0 fails of it, with an error that does not look like a lost peer."""
    honest = loop.forward_backward

    def forward_backward(session, samples, divisor):
        if session.step == 2 and session.ranks.rank == 1:
            raise RuntimeError("the cause")
        try:
            return honest(session, samples, divisor)
        except RuntimeError:
            raise ValueError("a consequence") from None

    loop.forward_backward = forward_backward
    return run_rank(run_dir, listener)


def infinite_row(run_dir, listener):
    """A gradient overflows in the third step, in rows that rank 1 alone owns."""
    honest = loop.update

    def update(session, lr):
        take = session.owned.take_gradients

        def take_and_break():
            take()
            if session.step == 2 and session.ranks.rank == 1:
                dict(session.owned.named_parameters())["norm.weight"].grad[0] = float("inf")

        session.owned.take_gradients = take_and_break
        norm = honest(session, lr)
        session.owned.take_gradients = take
        return norm

    loop.update = update
    return run_rank(run_dir, listener)


def scaling_of_replicas_alone(run_dir, listener):
    """A benchmark's rank that can stand replicas alone."""

    def measure(session):
        if session.job.layout.data_degree > session.job.layout.dp_replicate:
            raise RuntimeError("only replicas are for this test")
        scaling.measure(session)

    return run_session(measure, run_dir, listener)


def little_memory(run_dir, listener):
    """Rank 1 may take MESHWRIGHT_TEST_ROOM bytes more than it has when it starts.

    glibc maps its large blocks one by one, so that what is freed is free: its heap would keep holes.
    """
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) * 1024
        limit = held + int(os.environ["MESHWRIGHT_TEST_ROOM"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return run_rank(run_dir, listener)
