"""Entry points of ranks with a planted defect, which `prove` must find and locate."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.layout.axes import Axis, is_expert
from meshwright.models.moe import ExpertLinear
from meshwright.models.routing import Router, Tokens
from meshwright.parallel import apply, bucket_reducer, tensor_collectives, ulysses
from meshwright.parallel import expert as experts
from meshwright.parallel import ring_attention as ring
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import stages
from meshwright.parallel.pipeline.p2p import P2PExchange
from meshwright.parallel.pipeline.stages import StageRunner
from meshwright.parallel.ring_attention import RingContextParallel
from meshwright.parallel.sharded_state import ShardedState
from meshwright.parallel.tensor import RowParallelLinear, VocabParallelEmbedding
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.train import build
from meshwright.train.amp import MixedPrecision
from meshwright.train.batches import Batcher
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer
from meshwright.verify.prove import run_rank


def with_model(change):
    """An entry that changes the model before data parallelism is applied."""

    def entry(run_dir, listener):
        honest = apply.apply_data_parallel

        def apply_data_parallel(model, job, mesh, weights):
            change(model, mesh)
            return honest(model, job, mesh, weights)

        apply.apply_data_parallel = apply_data_parallel
        return run_rank(run_dir, listener)

    return entry


def unreduced(*names):
    """An entry whose replicas do not reduce the gradient of one parameter, given by all its names."""

    def leave_out(model, mesh):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)

    return with_model(leave_out)


missing_reduce = unreduced("blocks.1.ffn_norm.weight")
tied_reduce = unreduced("embed.weight", "head.weight")


def _freeze(model, mesh):
    model.blocks["0"].attention.wk.weight.requires_grad_(False)


no_gradient = with_model(_freeze)


def _restart_positions(model, mesh):
    """Rank 1 uses positions from zero for the second half of the sequence, like a wrong offset."""
    if mesh.rank == 1:
        half = len(model.rope_cos) // 2
        model.rope_cos[half:] = model.rope_cos[:half].clone()
        model.rope_sin[half:] = model.rope_sin[:half].clone()


rope_offset = with_model(_restart_positions)


def _grow(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["1"].ffn.down.weight *= 1.001


unequal_weight = with_model(_grow)


def _grow_norm(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["1"].attention_norm.weight *= 1.01


unequal_norm = with_model(_grow_norm)


def _spoil(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["0"].ffn.up.weight[0] = float("nan")


not_finite = with_model(_spoil)


def with_method(owner, name, change, run=run_rank):
    """An entry that replaces a method by ``change(honest, self, *arguments)``."""
    honest = getattr(owner, name)  # now: a name that is gone fails before any rank starts

    def entry(run_dir, listener):
        setattr(owner, name, lambda self, *arguments: change(honest, self, *arguments))
        return run(run_dir, listener)

    return entry


unsummed_norms = with_method(TensorParallel, "all_reduce_grads", lambda honest, self, *arguments: None)
"""Sequence parallel: gradients of replicated parameters are not reduced."""


def _without_copies(honest, self, *arguments):
    replicas, self.kv_replicas = self.kv_replicas, 1
    honest(self, *arguments)
    self.kv_replicas = replicas


unsummed_keys = with_method(TensorParallel, "all_reduce_grads", _without_copies)
"""Gradients of replicated key heads are not reduced."""
bias_on_every_rank = with_method(
    RowParallelLinear,
    "forward",
    lambda honest, self, x: self._tp.reduce_output(F.linear(x, self.weight, self.bias)),
)
"""The bias is added before the reduction, once per rank."""


def _other_vocabulary(honest, self, tokens):
    return honest(self, (tokens + self.num_embeddings) % (self._tp.size * self.num_embeddings))


other_words = with_method(VocabParallelEmbedding, "forward", _other_vocabulary)
"""Every rank uses its rows for the vocabulary of the next rank."""


def _first_tokens(honest, self, index):
    rank, self.rank = self.rank, 0
    found = honest(self, index)
    self.rank = rank
    return found


first_positions = with_method(TensorParallel, "local_tokens", _first_tokens)
"""Sequence parallel: every rank looks up the positions of the first rank's tokens."""


shifted_tokens = with_method(
    TensorParallel, "prepare_input", lambda honest, self, x: honest(self, x).roll(1, dims=1)
)
"""Gathered tokens are in a wrong order."""


def counted_as_data(axis):
    """An entry that divides the loss as if the ranks of an axis read different samples."""

    def entry(run_dir, listener):
        honest = Trainer.forward_backward
        Trainer.forward_backward = lambda trainer, batches, divisor: honest(
            trainer, batches, divisor * getattr(trainer.job.layout, axis)
        )
        return run_rank(run_dir, listener)

    return entry


tp_counted_as_data = counted_as_data("tp")
cp_counted_as_data = counted_as_data("cp")
pp_counted_as_data = counted_as_data("pp")


def with_function(owner, name, change):
    """An entry that replaces a function of a module by ``change(honest, *arguments)``."""
    honest = getattr(owner, name)  # now: a name that is gone fails before any rank starts

    def entry(run_dir, listener):
        setattr(owner, name, lambda *arguments: change(honest, *arguments))
        return run_rank(run_dir, listener)

    return entry


def _run_of_positions(honest, self, length, device):
    return torch.arange(length, device=device) + self.rank * length


contiguous_positions = with_method(RingContextParallel, "local_positions", _run_of_positions)
"""RoPE positions of a ring are contiguous instead of zig-zag."""
skipped_round = with_function(ring, "_merge", lambda honest, *arguments: None)
"""The output of all ring steps but the first is lost."""


def _average(honest, out, lse, part, part_lse):
    out.copy_((out + part) / 2)


averaged_rounds = with_function(ring, "_merge", _average)
"""Ring steps are averaged instead of merged by log-sum-exp."""


def _own_documents(honest, self, q, kv, round_):
    documents = self._segments
    if round_:
        self._segments = None
    found = list(honest(self, q, kv, round_))
    self._segments = documents
    return found


far_documents = with_method(ring._Ring, "blocks", _own_documents)
"""Only the first ring step masks documents."""
lost_sums = with_method(ring._HeadChunk, "wait_grads", lambda honest, self: 0 * honest(self))
"""Key and value gradients from other ranks' queries are lost."""
swapped_heads = with_function(
    ulysses, "all_to_all", lambda honest, *arguments: honest(*arguments).roll(1, dims=0)
)
"""Ulysses confuses the parts of two ranks."""


unsummed_router = with_function(tensor_collectives, "needs_tp_grad_sync", lambda honest, *arguments: False)
"""The router's gradient is not reduced over tp."""


def experts_summed_over(axis):
    """An entry whose expert gradients are reduced over a wrong axis, or over none."""

    def entry(run_dir, listener):
        honest = bucket_reducer.gradient_axis

        def gradient_axis(job, name):
            return axis if is_expert(name) else honest(job, name)

        bucket_reducer.gradient_axis = gradient_axis
        return run_rank(run_dir, listener)

    return entry


unsummed_experts = experts_summed_over(Axis("", 1))
experts_as_dense = experts_summed_over(Axis("cp", 2))


def _reverse_blocks(honest, self, answers, blocks):
    """The blocks of expert outputs are in reverse order."""
    return torch.cat(honest(self, answers, blocks).split(list(blocks))[::-1])


turned_answers = with_method(experts.TokenDispatcher, "_sum_etp", _reverse_blocks)
"""Outputs of the ep ranks are combined in the wrong order."""


def _whole_bias(honest, self, *arguments):
    self.bias_ranks = 1
    return honest(self, *arguments)


bias_of_every_part = with_method(ExpertLinear, "forward", _whole_bias)
"""Every etp rank adds the full bias of an expert's `down`."""
own_queues = with_method(
    experts.ShardedTokens,
    "expert_queue_positions",
    lambda honest, self, *arguments: Tokens.expert_queue_positions(self, *arguments),
)
"""Capacity is counted per rank instead of per sequence."""
own_counts = with_method(experts.ShardedTokens, "all_reduce_counts", lambda honest, self, counts: counts)
"""The balance loss counts local tokens only."""


untied_sum = with_method(ShardedState, "_all_reduce_tied_embedding", lambda honest, self: None)
"""The tied embedding's gradient is not reduced between first and last stage."""


def _forget_last(honest, self, stage, micro_batch):
    if self._stages[stage].weight_left > 1:
        return honest(self, stage, micro_batch)
    return self._stages[stage].deferred.clear()


forgotten_weights = with_method(StageRunner, "weight", _forget_last)
"""Deferred weight gradients of a stage's last micro-batch are dropped."""


def _reduce_early(honest, self, last):
    """Reduces one backward pass before the last one."""
    self.passes = getattr(self, "passes", 0) + 1
    honest(self, self.passes % MICRO_BATCHES == MICRO_BATCHES - 1)


MICRO_BATCHES = 2
"""Micro-batches per step of ``armed_early``."""
armed_early = with_method(BucketReducer, "begin", _reduce_early)
own_stage_norm = with_method(
    ShardedState,
    "_global_norm",
    lambda honest, self, gradients: torch.nn.utils.get_total_norm(list(gradients.values())),
)
"""Every rank clips by the gradient norm of its own stages."""


def _swap_first_two(honest, self, action, result):
    """The results of micro-batches 0 and 1 are swapped."""
    if action == Action(Kind.FORWARD, 0, 0):
        self.kept = result
    elif action == Action(Kind.FORWARD, 0, 1):
        honest(self, Action(Kind.FORWARD, 0, 0), result)
        honest(self, action, self.kept)
    else:
        honest(self, action, result)


swapped_micro_batches = with_method(P2PExchange, "send", _swap_first_two)


def bf16_borders(run_dir, listener):
    """Activations and gradients between stages are sent in bf16."""
    build, send, receive = P2PExchange.__init__, P2PExchange.send, P2PExchange.receive
    P2PExchange.__init__ = lambda self, *how: build(self, *how[:-1], torch.bfloat16)
    P2PExchange.send = lambda self, action, result: send(self, action, result.bfloat16())
    P2PExchange.receive = lambda self, source: receive(self, source).float()
    return run_rank(run_dir, listener)


def unreleased_weights(run_dir, listener):
    """A stage never reshards: its gradients stay unsharded."""
    honest = stages.set_gradient_sync

    def begin(module, job, last):
        honest(module, job, last)
        module.set_reshard_after_backward(False)

    stages.set_gradient_sync = begin
    return run_rank(run_dir, listener)


def first_stage_reports_loss(run_dir, listener):
    """The loss is counted on the first stage, which has none."""
    Mesh.reports_loss = property(lambda self: self.pp_rank == 0)
    return run_rank(run_dir, listener)


def wrong_divisor(run_dir, listener):
    """The loss is divided by the number of ranks once more: a mean of means."""
    honest = Trainer.forward_backward
    Trainer.forward_backward = lambda trainer, batches, divisor: honest(trainer, batches, 2 * divisor)
    return run_rank(run_dir, listener)


def wrong_loss_scale(run_dir, listener):
    """Rank 1 scales its loss and does not unscale the gradients."""
    honest = MixedPrecision.backward
    join = build.build_trainer

    def build_trainer(context, stop):
        if context.mesh.rank == 1:
            MixedPrecision.backward = lambda self, loss: honest(self, 4 * loss)
        return join(context, stop)

    from meshwright.train import worker

    worker.build_trainer = build_trainer
    return run_rank(run_dir, listener)


def wrong_sum(run_dir, listener):
    """Losses are averaged over ranks: gradients are right, the reported loss is not."""
    honest = Mesh.start_control_all_reduce

    def start_control_all_reduce(self, values, local_values=()):
        sums = honest(self, values, local_values)
        if isinstance(values[0], torch.Tensor):  # a loss
            sums.values[0] /= self.world_size
        return sums

    Mesh.start_control_all_reduce = start_control_all_reduce
    return run_rank(run_dir, listener)


def lost_update(run_dir, listener):
    """One gradient is zeroed before the optimizer step."""
    honest = Trainer.update

    def update(trainer, lr):
        trainer.model.blocks["0"].ffn.up.weight.grad.zero_()
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def wrong_samples(run_dir, listener):
    """Both ranks read the first half of the batch."""
    honest = Batcher.micro_batches
    Batcher.micro_batches = lambda self, samples: honest(self, np.tile(samples[: len(samples) // 2], 2))
    return run_rank(run_dir, listener)


def sharded(average):
    """An entry with FSDP2 instead of DDP; the defect is to average gradients."""

    def entry(run_dir, listener):
        def apply_data_parallel(model, job, mesh, weights):
            dp_mesh = DeviceMesh.from_group(mesh.group("dp_replicate"), "cpu")
            for module in (*model.list_blocks(), model):
                fully_shard(module, mesh=dp_mesh)
                if not average:
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            return model

        apply.apply_data_parallel = apply_data_parallel
        return run_rank(run_dir, listener)

    return entry


shards = sharded(average=False)
averaged_shards = sharded(average=True)


def dies(run_dir, listener):
    """Every rank raises in its third step."""
    honest = Trainer.update

    def update(trainer, lr):
        if trainer.step == 2:
            raise RuntimeError("the cat sat on the keyboard")
        return honest(trainer, lr)

    Trainer.update = update
    return run_rank(run_dir, listener)


def audited(run_dir, listener):
    """No defect: the second step, which the proof does not check, is audited like a step of `train`.

    Where router scores tie, the reference's choice is replayed in that step, too.
    """
    honest = Trainer.train_step

    def train_step(trainer, meter, observer):
        if trainer.step == 1:
            with AuditWithRouting(observer.routing, trainer) as audit:
                return honest(trainer, meter, audit)
        return honest(trainer, meter, observer)

    Trainer.train_step = train_step
    return run_rank(run_dir, listener)


class AuditWithRouting(StepAudit):
    """Audits a step and sets the micro-batch whose routing is replayed."""

    def __init__(self, choices, trainer):
        super().__init__(trainer)
        self._choices = choices

    def before_forward(self, micro_batch):
        self._choices.micro_batch = micro_batch
        super().before_forward(micro_batch)

    def before_backward(self, micro_batch):
        self._choices.micro_batch = micro_batch
        super().before_backward(micro_batch)


def _falling_scores(honest, self, scores):
    return honest(self, -torch.arange(scores.shape[1], dtype=scores.dtype).expand_as(scores))


first_experts_alone = with_method(Router, "_choose", _falling_scores, run=audited)
"""No defect: all tokens are routed to the same experts."""
