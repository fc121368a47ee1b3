"""Entries for ranks that misbehave on purpose; named by module and function, imported in the rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwright.run import loop, session
from meshwright.run.worker import run_rank, run_session


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


def note_gathers(run_dir, listener):
    """A rank that says, when a block computes forward or backward, how many gathers were asked for."""
    honest = loop.train

    def note(session):
        rows = [row for row in session.counter.rows() if row["op"] == "all_gather" and row["phase"] == "step"]
        if session.counter.phase == "step":
            session.events.write("gathers_so_far", gathers=sum(row["calls"] for row in rows))

    def watched(session):
        for block in session.model.blocks:
            block.attention.register_forward_pre_hook(lambda *_: note(session))
            block.ffn.register_full_backward_pre_hook(lambda *_: note(session))
        honest(session)

    return run_session(watched, run_dir, listener)


def count_graphs(run_dir, listener):
    """A rank that says how many graphs torch's compiler made."""
    honest = loop.train

    def counted(session):
        honest(session)
        session.events.write("graphs", graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])

    return run_session(counted, run_dir, listener)


def state_that_stays(run_dir, listener):
    """A rank that leaves its optimizer's state where it is, whatever the layout says."""
    session.offload_optimizer = lambda *_: None
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
