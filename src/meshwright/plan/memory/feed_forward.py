"""What the second half of a block holds: a dense feed-forward, or a router with its experts.

With N tokens of a micro-batch on a rank, D hidden, F inner width, e bytes of an operand (2 under bf16 and
fp16, else 4), a dense SwiGLU keeps N x (D + 4 F) e; GELU keeps 2 F for its 4 F.

With experts a rank routes n of its tokens (N / tp) to k of E experts each, and its own experts, F' wide on
it, read R rows: an even share is n k etp, less what a capacity drops. It keeps::

    n x (D 4 + 2 E 4)  +  n k x (D e + 4 + 24)            +  R x (D + 4 F') e
        router's input,       answers, weights and three      rows, inside
        logits, gradient      numbers of each choice          the experts

and 16 more for each row where rows travel over ``ep``: their order before and after. Sigmoid keeps 4 (k + 1)
more for each token; without auxiliary losses there is no gradient of theirs. In 16 bits weights are kept
rounded, too, and so is a copy of the experts' matrices. Shared experts keep what a dense feed-forward of
their width does; they read the tokens that the router reads, but for those that other ranks of ``tp`` route.

Selective recomputation keeps n E 4 + R x (2 F' + D) e: every product's output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.layout.axes import expert_axis
from meshwright.layout.parameters import FLOAT32_BYTES, operand_bytes, residual_bytes
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import balance_coefficient

INT64_BYTES = 8


@dataclass(frozen=True)
class FeedForwardSizes:
    """Bytes of one micro-batch's tensors behind a block's second norm."""

    kept: int
    """From forward to backward without recomputation, with the norm's output."""
    products: int
    """What selective recomputation keeps."""
    cached: int
    """16-bit copies of matrices that autocast makes; experts make their own, which are in `kept`."""
    at_work: int
    """What lives beside what is kept at the widest point of a forward pass that will be computed again."""
    backward: int
    """What lives beside a whole block and the residual's gradient at the widest point of the way back."""
    first_backward: int
    """The same where there are no gradients of experts yet, and those that are made stay."""
    split_backward: int
    """The same where the backward pass is split in two, and makes no gradients of matrices but experts'."""
    late: int
    """Inputs and output gradients of products whose matrices' gradients then come later."""
    passed: int = 0
    """What lives beside a block and the residual's gradient when its experts' backward pass begins."""
    after_experts: int = 0
    """What lives of it, and beside it, when the experts' backward pass is done; 0 for a dense one."""


def balanced_rows(job: Job, model: DecoderModel, micro_batch: int) -> int:
    """Rows that a rank's experts read in one layer if every expert is chosen equally often."""
    layout, experts = job.layout, model.num_experts or 1
    choices = job.data.seq_len * (model.experts_per_token or 0)
    if model.capacity_factor is not None:  # places are counted over whole sequences
        choices = min(choices, experts * math.ceil(model.capacity_factor * choices / experts))
    return micro_batch * choices * layout.etp // (layout.cp * layout.tp)


def row_bytes(job: Job, model: DecoderModel) -> int:
    """What one row that experts read keeps from forward to backward in one layer."""
    rows = _Routed(job, model, micro_batch=1, rows=1), _Routed(job, model, micro_batch=1, rows=0)
    return {
        "none": rows[0].kept - rows[1].kept,
        "selective": rows[0].products - rows[1].products,
        "full": 0,
    }[job.layout.recompute]


def size_feed_forward(job: Job, model: DecoderModel, micro_batch: int) -> FeedForwardSizes:
    """A dense feed-forward, as the rank holds it."""
    return _Plain(job, model, micro_batch, model.ffn_size).sizes()


def size_experts(
    job: Job, model: DecoderModel, micro_batch: int, rows: int | None = None
) -> FeedForwardSizes:
    """A router and experts, as the rank holds them.

    Args:
        job: With its layout settled.
        model: As the rank holds it.
        micro_batch: Samples of one forward pass.
        rows: That the experts read; None for an even share.
    """
    rows = balanced_rows(job, model, micro_batch) if rows is None else rows
    return _Routed(job, model, micro_batch, rows).sizes()


class _Plain:
    """A dense feed-forward of some width; of no width nothing."""

    def __init__(self, job: Job, model: DecoderModel, micro_batch: int, ffn: int) -> None:
        self.job, self.tokens = job, micro_batch * job.data.seq_len // job.layout.cp
        self.low, self.cut = operand_bytes(job.train.precision), job.layout.zero >= 2
        self.gated = model.activation == "swiglu"
        self.copied = self.low != FLOAT32_BYTES and not self.cut
        """Whether products read 16-bit copies; under ZeRO-2 and 3 those are what is gathered."""
        self.width = self.tokens * model.hidden_size * self.low if ffn else 0
        """T x D x e."""
        self.inner = self.tokens * ffn * self.low
        """T x F x e."""
        self.matrix = model.hidden_size * ffn
        """Elements of one of its matrices."""

    @property
    def inside(self) -> int:
        """What is kept between its first products and its last."""
        return (4 if self.gated else 2) * self.inner

    def sizes(self) -> FeedForwardSizes:
        """All of it."""
        layout = self.job.layout
        second, gathered = self.inner * self.gated, self.width * layout.sequence_parallel
        down = self.matrix * (self.low if self.cut else FLOAT32_BYTES)
        # Beside the gradient of the inner product that of the down matrix; or, where a product has two
        # factors, one more inner gradient. A cut block keeps all its gradients until they are reduced.
        widest = down + max(second, gathered) if self.cut else max(second, down + gathered)
        copy = self.matrix * self.low if self.copied else 0
        matrices = 3 if self.gated else 2
        # The weight gradient of the down matrix comes later: its input stays, beside the gradients of the
        # inner factors, and so does its output's gradient where that is not the residual's itself.
        cast = self.low != residual_bytes(self.job.train)
        output = self.width if cast or layout.sequence_parallel else 0
        split = output + self.inner + max((matrices - 1) * self.inner, copy)
        return FeedForwardSizes(
            kept=self.width + self.inside,
            products=(matrices - 1) * self.inner,
            cached=matrices * copy,
            at_work=({"none": 0, "selective": 1, "full": 2}[layout.recompute] + self.gated) * self.inner,
            backward=self.inner + widest,
            first_backward=self.inner + widest,
            split_backward=split,
            late=2 * self.width + matrices * self.inner,
        )


class _Routed:
    """A router, routed experts that read some rows, and shared ones."""

    def __init__(self, job: Job, model: DecoderModel, micro_batch: int, rows: int) -> None:
        self.job, self.model, self.rows = job, model, rows
        self.shared = _Plain(job, model, micro_batch, model.shared_width)
        self.low, self.gated, self.cut = self.shared.low, self.shared.gated, self.shared.cut
        self.own = self.shared.tokens // job.layout.tp
        """Tokens that this rank routes."""
        self.choices = self.own * (model.experts_per_token or 0)
        self.row = model.hidden_size * self.low
        """One row: D x e."""
        self.inner = rows * model.local_expert_width * self.low
        self.matrix = model.local_experts * model.local_expert_width * model.hidden_size
        """Elements of one matrix of all held experts."""
        self.travels = expert_axis(job.layout).size > 1

    @property
    def kept(self) -> int:
        """From forward to backward."""
        inside = self.rows * self.row + (4 if self.gated else 2) * self.inner
        if self.travels:  # where rows lie, as they arrive and by expert
            inside += 2 * self.rows * INT64_BYTES
        if self.shared.copied:
            inside += (3 if self.gated else 2) * self.matrix * self.low
        return self._router + self._choices + inside + self._shared

    @property
    def _router(self) -> int:
        """Its input and its logits in float32, and the auxiliary losses' gradient of them."""
        model, train = self.model, self.job.train
        experts = model.num_experts or 0
        injected = bool(balance_coefficient(train) or train.z_loss)
        each = model.hidden_size + (1 + injected) * experts
        if model.router == "sigmoid":  # and their sum, by which they are divided
            each += (model.experts_per_token or 0) + 1
        matrix = experts * model.hidden_size * FLOAT32_BYTES
        return self.own * each * FLOAT32_BYTES + (matrix if self.cut and self.low != FLOAT32_BYTES else 0)

    @property
    def _choices(self) -> int:
        """Each expert's answer, its weight, also rounded, which expert it is, where it lies in two orders.

        Of sigmoids the weight before it is rounded is not kept, but what it was made of, with the router.
        """
        weight = self.low
        if self.low != FLOAT32_BYTES and self.model.router == "softmax":
            weight += FLOAT32_BYTES
        return self.choices * (self.row + weight + 3 * INT64_BYTES)

    @property
    def _shared(self) -> int:
        """What shared experts keep; they read what the router reads, where that is all tokens and float32."""
        same = self.low == FLOAT32_BYTES and self.job.layout.tp == 1
        return self.shared.inside + (0 if same else self.shared.width)

    @property
    def products(self) -> int:
        """Outputs of products."""
        scores = self.own * (self.model.num_experts or 0) * FLOAT32_BYTES
        answers = self.rows * self.row + (2 if self.gated else 1) * self.inner
        return scores + answers + (2 if self.gated else 1) * self.shared.inner

    def _backward(self, stay: bool) -> int:
        """Beside a block less its shared experts, at the widest point; whether new gradients stay."""
        answers, rows = self.choices * self.row, self.rows * self.row
        gradient = self.matrix * (self.low if self.cut else FLOAT32_BYTES)
        # Answers have a gradient, and are let go. Rows travel back. The last product makes gradients of its
        # input and its matrices; the inner product those of its factors; then come the first products.
        found = [
            answers,
            2 * rows * self.travels - answers,
            rows + self.inner + gradient - answers,
            2 * self.inner * self.gated + gradient * stay - answers,
        ]
        if stay and self.gated:
            found.append(2 * rows - 3 * self.inner + 3 * gradient - answers)
        elif stay:
            found.append(rows - self.inner + 2 * gradient - answers)
        return max(found)

    def sizes(self) -> FeedForwardSizes:
        """All of it."""
        shared, rows, answers = self.shared.sizes(), self.rows * self.row, self.choices * self.row
        made = {"none": 0, "selective": 1, "full": 2}[self.job.layout.recompute] + self.gated
        # The way back of the shared experts comes first; then their part is gone, but for gradients.
        after = self.shared.width - self.shared.inside
        if self.cut:
            after += (3 if self.gated else 2) * self.shared.matrix * self.low
        backward = after + self._backward(stay=self.cut)
        return FeedForwardSizes(
            kept=self.kept,
            products=self.products,
            cached=shared.cached,
            at_work=max(shared.at_work, made * self.inner + rows),
            backward=max(shared.backward, backward),
            first_backward=max(shared.backward, after + self._backward(stay=True)),
            split_backward=max(shared.split_backward, backward),
            late=shared.late,
            passed=after + rows - answers,
            # The gradient of the rows is there, and that which shared experts gave.
            after_experts=self._router + self._choices - answers + rows + self.shared.width,
        )
