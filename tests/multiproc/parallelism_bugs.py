"""Rank entry points of `prove` with an injected parallelism bug, which `prove` must find and locate."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.checkpoint import resume as checkpoint_resume
from meshwright.checkpoint import saver as checkpoint_saver
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
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.parallel.ring_attention import RingContextParallel
from meshwright.parallel.tensor import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.parallel.zero1 import Zero1Parameters
from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.train import build
from meshwright.train import evaluate as evaluation
from meshwright.train import optimizer as train_optimizer
from meshwright.train import trainer as trainer_module
from meshwright.train.amp import MixedPrecision
from meshwright.train.batches import Batcher
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer
from meshwright.verify import checkpoint_reload
from meshwright.verify import prove as prove_rank
from meshwright.verify.prove import run_rank


def with_model(change):
    """An entry that changes the model before data parallelism is applied."""

    def entry(run_dir, listener):
        original = apply.apply_data_parallel

        def apply_data_parallel(model, job, mesh, weights):
            change(model, mesh)
            return original(model, job, mesh, weights)

        apply.apply_data_parallel = apply_data_parallel
        return run_rank(run_dir, listener)

    return entry


def unreduced(*names):
    """An entry whose replicas do not reduce the gradient of one parameter, given by all its names."""

    def ignore(model, mesh):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)

    return with_model(ignore)


unreduced_norm = unreduced("blocks.1.ffn_norm.weight")
unreduced_tied_embedding = unreduced("embed.weight", "head.weight")


def _freeze(model, mesh):
    model.blocks["0"].attention.wk.weight.requires_grad_(False)


frozen_weight = with_model(_freeze)


def _restart_positions(model, mesh):
    """Rank 1 uses positions from zero for the second half of the sequence, like a wrong offset."""
    if mesh.rank == 1:
        half = len(model.rope_cos) // 2
        model.rope_cos[half:] = model.rope_cos[:half].clone()
        model.rope_sin[half:] = model.rope_sin[:half].clone()


rope_positions_restart = with_model(_restart_positions)


def _scale_linear(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["1"].ffn.down.weight *= 1.001


unequal_linear_weight = with_model(_scale_linear)


def _scale_norm(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["1"].attention_norm.weight *= 1.01


unequal_norm_weight = with_model(_scale_norm)


def _set_nan(model, mesh):
    if mesh.rank == 1:
        with torch.no_grad():
            model.blocks["0"].ffn.up.weight[0] = float("nan")


nan_weight = with_model(_set_nan)


def with_method(owner, name, change, run=run_rank):
    """An entry that replaces a method by ``change(original, self, *arguments)``."""
    original = getattr(owner, name)  # on import: an unknown name fails before any rank starts

    def entry(run_dir, listener):
        setattr(owner, name, lambda self, *arguments: change(original, self, *arguments))
        return run(run_dir, listener)

    return entry


tp_unreduced_replicated_grads = with_method(
    TensorParallel, "all_reduce_grads", lambda original, self, *arguments: None
)
"""Sequence parallel: gradients of replicated parameters are not reduced."""


def _without_kv_replicas(original, self, *arguments):
    replicas, self.kv_replicas = self.kv_replicas, 1
    original(self, *arguments)
    self.kv_replicas = replicas


tp_unreduced_kv_replicas = with_method(TensorParallel, "all_reduce_grads", _without_kv_replicas)
"""Gradients of replicated key heads are not reduced."""
tp_bias_before_reduce = with_method(
    RowParallelLinear,
    "forward",
    lambda original, self, x: self._tp.reduce_output(F.linear(x, self.weight, self.bias)),
)
"""The bias is added before the reduction, once per rank."""


def _next_vocab_shard(original, self, tokens):
    return original(self, (tokens + self.num_embeddings) % (self._tp.size * self.num_embeddings))


tp_wrong_vocab_shard = with_method(VocabParallelEmbedding, "forward", _next_vocab_shard)
"""Every rank uses its rows for the vocabulary of the next rank."""


def _positions_of_rank_0(original, self, index):
    rank, self.rank = self.rank, 0
    tokens = original(self, index)
    self.rank = rank
    return tokens


sp_positions_of_rank_0 = with_method(TensorParallel, "local_tokens", _positions_of_rank_0)
"""Sequence parallel: every rank looks up the positions of the first rank's tokens."""


sp_gathered_tokens_shifted = with_method(
    TensorParallel, "prepare_input", lambda original, self, x: original(self, x).roll(1, dims=1)
)
"""The all-gathered tokens are shifted by one."""


def counted_as_data(axis):
    """An entry that divides the loss as if the ranks of an axis read different samples."""

    def entry(run_dir, listener):
        original = Trainer.forward_backward
        Trainer.forward_backward = lambda trainer, batches, divisor, observer: original(
            trainer, batches, divisor * getattr(trainer.job.layout, axis), observer
        )
        return run_rank(run_dir, listener)

    return entry


tp_counted_as_data = counted_as_data("tp")
cp_counted_as_data = counted_as_data("cp")
pp_counted_as_data = counted_as_data("pp")


def with_function(owner, name, change):
    """An entry that replaces a function of a module by ``change(original, *arguments)``."""
    original = getattr(owner, name)  # on import: an unknown name fails before any rank starts

    def entry(run_dir, listener):
        setattr(owner, name, lambda *arguments, **named: change(original, *arguments, **named))
        return run_rank(run_dir, listener)

    return entry


def _contiguous_positions(original, self, length, device):
    return torch.arange(length, device=device) + self.rank * length


ring_contiguous_positions = with_method(RingContextParallel, "local_positions", _contiguous_positions)
"""RoPE positions of a ring are contiguous instead of zig-zag."""
ring_steps_not_merged = with_function(ring, "_merge", lambda original, *arguments: None)
"""The outputs of all ring steps but the first are lost."""


def _average(original, out, lse, part, part_lse):
    out.copy_((out + part) / 2)


ring_steps_averaged = with_function(ring, "_merge", _average)
"""Ring steps are averaged instead of merged by log-sum-exp."""


def _mask_first_step(original, self, q, kv, round_):
    documents = self._segments
    if round_:
        self._segments = None
    blocks = list(original(self, q, kv, round_))
    self._segments = documents
    return blocks


ring_document_mask_first_step_only = with_method(ring._Ring, "blocks", _mask_first_step)
"""Only the first ring step masks documents."""
ring_kv_grads_lost = with_method(ring._HeadChunk, "wait_grads", lambda original, self: 0 * original(self))
"""Key and value gradients from other ranks' queries are lost."""
ulysses_heads_swapped = with_function(
    ulysses, "all_to_all", lambda original, *arguments: original(*arguments).roll(1, dims=0)
)
"""Ulysses: the heads of two ranks are swapped."""


router_grad_unreduced = with_function(
    tensor_collectives, "needs_tp_grad_sync", lambda original, *arguments: False
)
"""The router's gradient is not reduced over tp."""


def expert_grads_reduced_over(axis):
    """An entry whose expert gradients are reduced over a wrong axis, or over none."""

    def entry(run_dir, listener):
        original = bucket_reducer.gradient_axis

        def gradient_axis(job, name):
            return axis if is_expert(name) else original(job, name)

        bucket_reducer.gradient_axis = gradient_axis
        return run_rank(run_dir, listener)

    return entry


expert_grads_unreduced = expert_grads_reduced_over(Axis("", 1))
expert_grads_reduced_over_cp = expert_grads_reduced_over(Axis("cp", 2))


def _reverse_blocks(original, self, outputs, blocks):
    """Reverse the blocks of expert outputs."""
    return torch.cat(original(self, outputs, blocks).split(list(blocks))[::-1])


expert_outputs_reversed = with_method(experts.TokenDispatcher, "_sum_etp", _reverse_blocks)
"""Outputs of the ep ranks are combined in the wrong order."""


def _full_bias(original, self, *arguments):
    self.bias_ranks = 1
    return original(self, *arguments)


etp_bias_on_every_rank = with_method(ExpertLinear, "forward", _full_bias)
"""Every etp rank adds the full bias of an expert's `down`."""
capacity_per_rank = with_method(
    experts.ShardedTokens,
    "expert_queue_positions",
    lambda original, self, *arguments: Tokens.expert_queue_positions(self, *arguments),
)
"""Capacity is counted per rank instead of per sequence."""
balance_counts_per_rank = with_method(
    experts.ShardedTokens, "all_reduce_counts", lambda original, self, counts: counts
)
"""The balance loss counts local tokens only."""


pp_tied_embedding_unreduced = with_method(
    RankParameters, "_all_reduce_tied_embedding", lambda original, self: None
)
"""The tied embedding's gradient is not reduced between first and last stage."""


def _drop_last(original, self, stage, micro_batch):
    if self._stages[stage].weight_left > 1:
        return original(self, stage, micro_batch)
    return self._stages[stage].deferred.clear()


pp_weight_grads_dropped = with_method(StageRunner, "weight", _drop_last)
"""Deferred weight gradients of a stage's last micro-batch are dropped."""


def _reduce_early(original, self, last):
    """Reduce in the backward pass before the last one."""
    self.passes = getattr(self, "passes", 0) + 1
    original(self, self.passes % MICRO_BATCHES == MICRO_BATCHES - 1)


MICRO_BATCHES = 2
"""Micro-batches per step in the test of ``pp_reduce_one_backward_early``."""
pp_reduce_one_backward_early = with_method(BucketReducer, "begin", _reduce_early)
pp_clip_by_stage_norm = with_method(
    RankParameters,
    "_global_norm",
    lambda original, self, gradients: torch.nn.utils.get_total_norm(list(gradients.values())),
)
"""Every rank clips by the gradient norm of its own stages."""


def _swap_first_two(original, self, action, result):
    """Swap the activations of micro-batches 0 and 1."""
    if action == Action(Kind.FORWARD, 0, 0):
        self.kept = result
    elif action == Action(Kind.FORWARD, 0, 1):
        original(self, Action(Kind.FORWARD, 0, 0), result)
        original(self, action, self.kept)
    else:
        original(self, action, result)


pp_micro_batches_swapped = with_method(P2PExchange, "send", _swap_first_two)


def pp_bf16_transfers(run_dir, listener):
    """Activations and gradients between stages are sent in bf16."""
    build, send, receive = P2PExchange.__init__, P2PExchange.send, P2PExchange.receive
    P2PExchange.__init__ = lambda self, *how: build(self, *how[:-1], torch.bfloat16)
    P2PExchange.send = lambda self, action, result: send(self, action, result.bfloat16())
    P2PExchange.receive = lambda self, source: receive(self, source).float()
    return run_rank(run_dir, listener)


def pp_fsdp_never_reshards(run_dir, listener):
    """A stage never reshards. Its gradients stay unsharded."""
    original = stages.set_gradient_sync

    def begin(module, job, last):
        original(module, job, last)
        module.set_reshard_after_backward(False)

    stages.set_gradient_sync = begin
    return run_rank(run_dir, listener)


def pp_loss_from_first_stage(run_dir, listener):
    """The first stage reports the loss, which only the last stage computes."""
    Mesh.reports_loss = property(lambda self: self.pp_rank == 0)
    return run_rank(run_dir, listener)


def loss_divided_twice(run_dir, listener):
    """The loss is divided by the number of ranks a second time."""
    original = Trainer.forward_backward
    Trainer.forward_backward = lambda trainer, batches, divisor, observer: original(
        trainer, batches, 2 * divisor, observer
    )
    return run_rank(run_dir, listener)


def loss_scaled_on_one_rank(run_dir, listener):
    """Rank 1 scales its loss and does not unscale the gradients."""
    original = MixedPrecision.backward
    join = build.build_trainer

    def build_trainer(context, stop):
        if context.mesh.rank == 1:
            MixedPrecision.backward = lambda self, loss: original(self, 4 * loss)
        return join(context, stop)

    from meshwright.train import worker

    worker.build_trainer = build_trainer
    return run_rank(run_dir, listener)


def loss_averaged_over_ranks(run_dir, listener):
    """Losses are averaged over ranks instead of summed. Gradients are correct, the reported loss is wrong."""
    original = Mesh.start_control_all_reduce

    def start_control_all_reduce(self, values, local_values=()):
        sums = original(self, values, local_values)
        if isinstance(values[0], torch.Tensor):  # a loss
            sums.values[0] /= self.world_size
        return sums

    Mesh.start_control_all_reduce = start_control_all_reduce
    return run_rank(run_dir, listener)


def gradient_zeroed_before_update(run_dir, listener):
    """One gradient is zeroed before the optimizer step."""
    original = Trainer.update

    def update(trainer, *args):
        trainer.model.blocks["0"].ffn.up.weight.grad.zero_()
        return original(trainer, *args)

    Trainer.update = update
    return run_rank(run_dir, listener)


def _without_decay(original, *arguments):
    return [{**group, "weight_decay": 0.0} for group in original(*arguments)]


no_weight_decay = with_function(train_optimizer, "build_groups", _without_decay)
norms_decay = with_function(train_optimizer, "decays", lambda original, *arguments: True)
"""Weight decay of all parameters: norms and biases, too."""
gradients_not_clipped = with_function(
    torch.nn.utils, "clip_grads_with_norm_", lambda original, *arguments: None
)
lr_of_next_step = with_function(
    trainer_module, "lr_at", lambda original, step, train: original(step + 1, train)
)
replicas_in_norm = with_method(
    RankParameters, "_global_norm", lambda original, self, gradients: 2**0.5 * original(self, gradients)
)


def with_optimizer_state(change):
    """An entry that changes the optimizer state of every parameter before each update."""

    def before_step(original, self, optimizer, *more):
        for state in optimizer.state.values():
            change(state)
        return original(self, optimizer, *more)

    return with_method(MixedPrecision, "step", before_step)


def _restart_moments(state):
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


moments_restart = with_optimizer_state(_restart_moments)
step_count_restarts = with_optimizer_state(lambda state: state["step"].zero_())


def _gather_stale(original, self):
    """Rank 1 keeps the first row of each matrix from before the update."""
    stale = {name: p[0].clone() for name, p in self._parameters.items() if p.ndim > 1}
    original(self)
    if self._mesh.rank == 1:
        with torch.no_grad():
            for name, row in stale.items():
                self._parameters[name][0] = row


first_rows_not_gathered = with_method(Zero1Parameters, "all_gather_parameters", _gather_stale)


def _count_rank_0(original, trainer):
    sums = Mesh.all_reduce_scalars
    Mesh.all_reduce_scalars = lambda self, values: sums(self, [v * (self.rank == 0) for v in values])
    losses = original(trainer)
    Mesh.all_reduce_scalars = sums
    return losses


eval_of_rank_0_alone = with_function(prove_rank, "evaluate", _count_rank_0)
"""The held-out loss is that of rank 0."""
eval_without_last_sample = with_function(
    evaluation, "first_samples", lambda original, *arguments: original(*arguments)[:-1]
)


def with_loaded_moments(change):
    """An entry that changes the tensors that a checkpoint loads: by key and target."""

    def load(original, saved, name, target, chunks):
        original(saved, name, target, chunks)
        if ":" in name:
            change(name, target)

    return with_function(checkpoint_resume, "_load_chunks", load)


def _swap_rows(key, target):
    if key.endswith(":exp_avg") and len(target) > 1:
        target.copy_(target.flip(0))


def _keep_second_moment(key, target):
    if key.endswith(":exp_avg_sq"):
        target.zero_()


moment_rows_swapped_on_load = with_loaded_moments(_swap_rows)
second_moment_not_loaded = with_loaded_moments(_keep_second_moment)


def moment_rows_swapped_in_file(run_dir, listener):
    """Saving and loading reverse the rows of moments: this layout restores them, another would not."""
    list_parts, load = checkpoint_saver.list_write_items, checkpoint_resume._load_chunks

    def list_reversed(state, rank):
        return [
            part._replace(values=part.values.flip(0)) if ":" in part.name and part.values.ndim else part
            for part in list_parts(state, rank)
        ]

    def load_reversed(saved, name, target, chunks):
        load(saved, name, target, chunks)
        if ":" in name and target.ndim:
            target.copy_(target.flip(0))

    checkpoint_saver.list_write_items, checkpoint_resume._load_chunks = list_reversed, load_reversed
    return run_rank(run_dir, listener)


def _keep_position(original, state, checkpoint, rank):
    position = state.counters.position
    notes = original(state, checkpoint, rank)
    state.counters.position = position
    return notes


position_not_loaded = with_function(checkpoint_reload, "resume", _keep_position)


def _save_stale(original, state, rank):
    """One saved weight is not the one in memory."""
    return [
        part._replace(values=part.values * 1.01) if part.name == "blocks.0.ffn.up.weight" else part
        for part in original(state, rank)
    ]


stale_weights_saved = with_function(checkpoint_saver, "list_write_items", _save_stale)


def _zero_row(model, mesh):
    """Rank 1 starts with a row of zeros; no sample of the first steps reads it."""
    if mesh.rank == 1:
        with torch.no_grad():
            model.embed.weight[3] = 0.0


zeroed_embedding_row = with_model(_zero_row)


def _mask_last_row(original, self, tokens):
    """The last token of each tensor-parallel part is taken for one of the next part."""
    last = (tokens + 1) % self.num_embeddings == 0
    return original(self, tokens.masked_fill(last, self._tp.size * self.num_embeddings))


tp_last_token_of_part_lost = with_method(VocabParallelEmbedding, "forward", _mask_last_row)


def _lose_first_target(original, self, logits, targets, wanted):
    """The logit of the first token of the second part is not counted as a target."""
    lost = targets == self.out_features
    return original(self, logits, torch.where(lost, self._tp.size * self.out_features, targets), wanted)


tp_first_target_of_part_lost = with_method(VocabParallelHead, "_softmax", _lose_first_target)


norm_keeps_loss_scale = with_method(
    MixedPrecision,
    "unscale_gradients",
    lambda original, self, *arguments: original(self, *arguments) * self.loss_scale(),
)
"""fp16: the reported gradient norm is that of the scaled gradients."""


def _clip_scaled(original, self, rank_parameters, *arguments):
    """Rank 1 multiplies its gradients by two after they are unscaled."""
    norm = original(self, rank_parameters, *arguments)
    if torch.distributed.get_rank() == 1:
        for _, parameter in rank_parameters.named_parameters():
            parameter.grad *= 2
    return norm


gradients_keep_loss_scale_on_rank_1 = with_method(MixedPrecision, "clip_gradients", _clip_scaled)


def ranks_read_same_samples(run_dir, listener):
    """Both ranks read the first half of the batch."""
    original = Batcher.micro_batches
    Batcher.micro_batches = lambda self, samples, *more: original(
        self, np.tile(samples[: len(samples) // 2], 2), *more
    )
    return run_rank(run_dir, listener)


fsdp_averaged_grads = with_method(
    FSDPModule, "set_gradient_divide_factor", lambda original, self, factor: original(self, 2.0)
)
"""FSDP2 divides the gradients by the number of ranks, as it does by default."""


def exception_in_step_3(run_dir, listener):
    """Every rank raises in its third step."""
    original = Trainer.update

    def update(trainer, *args):
        if trainer.step == 2:
            raise RuntimeError("raised by the test")
        return original(trainer, *args)

    Trainer.update = update
    return run_rank(run_dir, listener)


def audited(run_dir, listener):
    """No bug: the second step, which the proof does not check, is audited like a step of `train`.

    The reference's routing is replayed in that step too, because router scores can tie.
    """
    original = Trainer.train_step

    def train_step(trainer, meter, observer):
        if trainer.step == 1:
            with AuditWithRouting(observer.routing, trainer) as audit:
                return original(trainer, meter, audit)
        return original(trainer, meter, observer)

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


def _falling_scores(original, self, scores):
    return original(self, -torch.arange(scores.shape[1], dtype=scores.dtype).expand_as(scores))


route_to_first_experts = with_method(Router, "_choose", _falling_scores, run=audited)
"""No bug: all tokens are routed to the first experts."""
