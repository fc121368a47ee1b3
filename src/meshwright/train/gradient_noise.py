"""Two things called gradient noise: Gaussian noise that is added, and the noise scale that is measured.

**Added** (Neelakantan et al., 2015, arXiv 1511.06807): each element gets noise of the variance
``eta / (1 + step) ** 0.55``, a function of (seed, step, parameter name) alone.

**Measured** (McCandlish et al., 2018, arXiv 1812.06162, appendix A.1): B_simple = tr(Sigma) / |G|^2, the
batch at which the noise of the gradient is as large as the gradient. With N targets in the batch, g the sum
of the gradients of a part with n of them and T the noise of one target::

    E |g / n|^2   = |G|^2 + T / n             the part, as if it were the whole
    E |whole|^2   = |G|^2 + T / N

Parts of unequal size are averaged with the weights n / N. Over k parts, ``part = sum n / N |g / n|^2`` has
the mean ``|G|^2 + T k / N``; one part alone is the same with ``k = N / n``. Hence the unbiased::

    |G|^2 = (k whole - part) / (k - 1)        T / N = (part - whole) / (k - 1)

This assumes that the noise of a sum grows with its number of targets; it is exact where all samples have
equally many. The result counts samples, like ``train.global_batch``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.models.init import parameter_seed
from meshwright.parallel.ddp import FixedBucketDDP
from meshwright.parallel.sharded_state import ShardedState
from meshwright.spec.job import Train

ANNEALING = 0.55
"""Power of the step by which the added variance falls (Neelakantan et al.)."""
EMA_DECAY = 0.9
"""Weight of the past in the averages of |G|^2 and T: a single measurement is as noisy as the gradient."""


def noise_std(step: int, train: Train) -> float:
    """Standard deviation of the noise added in a step; the annealing is that of the variance."""
    return math.sqrt(train.grad_noise / (1 + step) ** ANNEALING)


@torch.no_grad()
def add_noise(sharded_state: ShardedState, train: Train, step: int) -> None:
    """Add this step's noise to every gradient, the same on every rank; nothing if the job wants none.

    Drawn on the CPU whatever the device, as initial weights are.
    """
    std = noise_std(step, train)
    if std == 0:
        return
    for name, parameter in sharded_state.named_parameters():
        if parameter.grad is None:
            continue
        seed = parameter_seed(train.seed, f"gradient-noise/{step}/{name}")
        drawn = torch.empty(sharded_state.shape(name), dtype=torch.float32)
        drawn.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
        parameter.grad.add_(sharded_state.shard(name, drawn).to(parameter.grad.device))


def estimate_noise(part: float, whole: float, k: float) -> tuple[float, float]:
    """|G|^2 and T / N of the formulas above."""
    return (k * whole - part) / (k - 1), (part - whole) / (k - 1)


class NoiseScale:
    """Measures the gradient noise scale in every so many steps, and averages.

    With replicas the parts are the ranks, each of which sees its own gradient before it is summed. In one
    process there is one part, the first micro-batch.
    """

    def __init__(self, module: nn.Module, every: int) -> None:
        self._module = module
        self._every = every
        self._measuring = False
        self._part: Tensor | None = None
        """Squared norm of the part's gradient, which is divided by the targets of the whole batch."""
        self._part_targets = 0
        self._whole: Tensor | float = 0.0
        self._mean_square = 0.0
        self._mean_noise = 0.0

    def begin(self, step: int) -> None:
        """A step begins, the first being 1."""
        self._measuring = self._every > 0 and step % self._every == 0
        self._part, self._part_targets = None, 0
        if isinstance(self._module, FixedBucketDDP):
            self._module.local_grad_norm.begin(self._measuring)

    def after_micro_batch(self, targets_seen: int) -> None:
        """The gradients hold the micro-batches so far, the last of which has just been added."""
        if not self._measuring or isinstance(self._module, FixedBucketDDP) or self._part is not None:
            return
        self._part, self._part_targets = _square(self._module), targets_seen

    def parts(self, divisor: int, own_targets: int) -> list[Tensor | float]:
        """What is added up over the ranks: the weighted squared norm of this part, and k.

        Args:
            divisor: Targets of the whole batch, by which the gradients are divided.
            own_targets: Those of this rank.
        """
        if self._every == 0:
            return []
        if not self._measuring:
            return [0.0, 0.0]
        self._whole = _square(self._module)
        if isinstance(self._module, FixedBucketDDP):
            if own_targets == 0:
                return [0.0, 0.0]
            # |g / n|^2 n / N, of gradients that are g / N
            return [self._module.local_grad_norm.total * (divisor / own_targets), 1.0]
        assert self._part is not None, "no micro-batch was seen"
        if self._part_targets == 0:
            return [0.0, 0.0]
        share = divisor / self._part_targets
        return [self._part * share**2, share]

    def estimate(self, summed: list[float], samples: int, loss_scale: float) -> float | None:
        """The noise scale in samples, or None where this step does not tell it.

        Args:
            summed: ``parts`` of all ranks, added up.
            samples: Of the whole batch.
            loss_scale: By which the gradients were multiplied when they were looked at.
        """
        if not self._measuring:
            return None
        part, k = summed[0] / loss_scale**2, summed[1]
        whole = float(self._whole) / loss_scale**2
        if k <= 1 or not math.isfinite(part + whole):  # one part had everything; or an overflow of fp16
            return None
        square, noise = estimate_noise(part, whole, k)
        self._mean_square = EMA_DECAY * self._mean_square + (1 - EMA_DECAY) * square
        self._mean_noise = EMA_DECAY * self._mean_noise + (1 - EMA_DECAY) * noise
        if self._mean_square <= 0 or self._mean_noise < 0:  # the estimates are still too rough to tell
            return None
        return samples * self._mean_noise / self._mean_square


def _square(module: nn.Module) -> Tensor:
    """Squared norm of all gradients."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).double().square()
