"""Gradient noise: Gaussian noise that is added, and the gradient noise scale that is measured.

**Added** (Neelakantan et al., 2015, arXiv 1511.06807): each element gets noise of variance
``eta / (1 + step) ** 0.55``, which depends on (seed, step, parameter name) only.

**Measured** (McCandlish et al., 2018, arXiv 1812.06162, appendix A.1): B_simple = tr(Sigma) / |G|^2, the
batch size at which the noise of the gradient equals the gradient. Let the batch have N targets, let g be the
summed gradient of a part with n targets, and T the noise of one target::

    E |g / n|^2   = |G|^2 + T / n             a part, taken as a batch
    E |whole|^2   = |G|^2 + T / N

Parts of different size are averaged with weights n / N. Over k parts, ``part = sum n / N |g / n|^2`` has
the mean ``|G|^2 + T k / N``; a single part is the case ``k = N / n``. Hence the unbiased estimates::

    |G|^2 = (k whole - part) / (k - 1)        T / N = (part - whole) / (k - 1)

This assumes that the noise of a sum grows with its number of targets; it is exact if all samples have
the same number. The result is in samples, like ``train.global_batch``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.weight_source import parameter_seed
from meshwright.parallel.ddp import FixedBucketDDP
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.job import Train

ANNEALING = 0.55
"""Exponent of the decay of the added variance (Neelakantan et al.)."""
EMA_DECAY = 0.9
"""Decay of the running averages of |G|^2 and T: a single measurement is as noisy as the gradient."""


def noise_std(step: int, train: Train) -> float:
    """Standard deviation of the noise added in a step."""
    return math.sqrt(train.grad_noise / (1 + step) ** ANNEALING)


@torch.no_grad()
def add_noise(rank_parameters: RankParameters, train: Train, step: int) -> None:
    """Add the noise of a step to every gradient, the same in every layout; nothing with ``grad_noise=0``.

    It is drawn on the CPU for every device, like initial weights.
    """
    if not train.grad_noise:
        return
    for name, parameter in rank_parameters.named_parameters():
        if parameter.grad is not None:
            drawn = draw_noise(name, rank_parameters.shape(name), train, step)
            parameter.grad.add_(rank_parameters.shard(name, drawn).to(parameter.grad.device))


def draw_noise(name: str, shape: Sequence[int], train: Train, step: int) -> Tensor:
    """The noise of a full parameter in a step."""
    generator = torch.Generator().manual_seed(parameter_seed(train.seed, f"gradient-noise/{step}/{name}"))
    drawn = torch.empty(tuple(shape), dtype=torch.float32)
    return drawn.normal_(0.0, noise_std(step, train), generator=generator)


def estimate_noise(part: float, whole: float, k: float) -> tuple[float, float]:
    """|G|^2 and T / N by the formulas above."""
    return (k * whole - part) / (k - 1), (part - whole) / (k - 1)


class NoiseScale:
    """Measures the gradient noise scale every few steps and averages it.

    With data-parallel replicas the parts are the ranks: each measures its gradient before the all-reduce. In
    one process there is one part, the first micro-batch.
    """

    def __init__(self, module: nn.Module, every: int) -> None:
        self._module = module
        self._every = every
        self._measuring = False
        self._part: Tensor | None = None
        """Squared norm of the gradient of the part, divided by the targets of the whole batch."""
        self._part_targets = 0
        self._whole: Tensor | float = 0.0
        self._mean_square = 0.0
        self._mean_noise = 0.0

    def begin(self, step: int) -> None:
        """A step begins; the first is 1."""
        self._measuring = self._every > 0 and step % self._every == 0
        self._part, self._part_targets = None, 0
        if isinstance(self._module, FixedBucketDDP):
            self._module.local_grad_norm.begin(self._measuring)

    def after_micro_batch(self, targets_seen: int) -> None:
        """The gradient of a micro-batch was accumulated."""
        if not self._measuring or isinstance(self._module, FixedBucketDDP) or self._part is not None:
            return
        self._part, self._part_targets = _square(self._module), targets_seen

    def parts(self, divisor: int, local_targets: int) -> list[Tensor | float]:
        """The terms to sum over the ranks: the weighted squared norm of this part, and k.

        Args:
            divisor: Targets of the whole batch, by which the gradients are divided.
            local_targets: Targets of this rank.
        """
        if self._every == 0:
            return []
        if not self._measuring:
            return [0.0, 0.0]
        self._whole = _square(self._module)
        if isinstance(self._module, FixedBucketDDP):
            if local_targets == 0:
                return [0.0, 0.0]
            # |g / n|^2 n / N, of gradients that are g / N
            return [self._module.local_grad_norm.total * (divisor / local_targets), 1.0]
        assert self._part is not None, "no micro-batch was seen"
        if self._part_targets == 0:
            return [0.0, 0.0]
        share = divisor / self._part_targets
        return [self._part * share**2, share]

    def estimate(self, summed: list[float], samples: int, loss_scale: float) -> float | None:
        """The noise scale in samples; None if this step does not give one.

        Args:
            summed: ``parts``, summed over all ranks.
            samples: Samples of the whole batch.
            loss_scale: Factor of the gradients when they were measured.
        """
        if not self._measuring:
            return None
        part, k = summed[0] / loss_scale**2, summed[1]
        whole = float(self._whole) / loss_scale**2
        if k <= 1 or not math.isfinite(part + whole):  # one part had all targets, or fp16 overflowed
            return None
        square, noise = estimate_noise(part, whole, k)
        self._mean_square = EMA_DECAY * self._mean_square + (1 - EMA_DECAY) * square
        self._mean_noise = EMA_DECAY * self._mean_noise + (1 - EMA_DECAY) * noise
        if self._mean_square <= 0 or self._mean_noise < 0:  # the estimates are still too noisy
            return None
        return samples * self._mean_noise / self._mean_square


def _square(module: nn.Module) -> Tensor:
    """Squared norm of all gradients."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).double().square()
