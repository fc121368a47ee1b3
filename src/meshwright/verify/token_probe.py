"""Batches and lookups that reach every token of the vocabulary.

Real text reaches few tokens in ten steps. The last steps of a proof read their samples with other tokens:
those at the ends of tensor-parallel parts first, then all others, as inputs and as targets. Masks and
documents stay those of the samples. In addition, embedding and head are called alone: the embedding of every
token is looked up once, and the loss of the tokens that are probed first is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from meshwright.data.dataset import IGNORE_INDEX, SampleBatch
from meshwright.models.decoder import Decoder, Head
from meshwright.parallel.full_tensors import full_tensor, is_sharded
from meshwright.parallel.tensor import gather_full_activation
from meshwright.spec.model import DecoderModel
from meshwright.train.batches import Batcher, BatchPrefetcher, Samples
from meshwright.train.trainer import Trainer
from meshwright.verify.proof_task import FIRST_PROBE_STEP, LOSS_TOLERANCE

PARTS = range(1, 17)
"""Tensor-parallel degrees whose parts have their first and last token probed first."""
EMBEDDING, HEAD = "embed", "head"
TARGETS, MAX_CALLS = 64, 8
"""Targets of one call of the head, few enough for one wrong logit to show; and the number of calls."""


def order_tokens(vocab_size: int) -> npt.NDArray[np.int64]:
    """All tokens, the first and last of tensor-parallel parts first."""
    ends = {0, vocab_size - 1}
    for parts in PARTS:
        rows = -(-vocab_size // parts)
        ends |= {token for part in range(1, parts) for token in (part * rows - 1, part * rows)}
    first = np.array(sorted(token for token in ends if token < vocab_size))
    return np.concatenate((first, np.setdiff1d(np.arange(vocab_size), first)))


@dataclass(frozen=True, kw_only=True)
class ProbeBatcher(Batcher):
    """Replaces the tokens of some samples."""

    rows: dict[int, int]
    """The number of each sample with other tokens: 0 for the first ``seq_len`` of them."""
    probe: npt.NDArray[np.int64]
    """The other tokens, in order."""

    def read(self, samples: Samples) -> SampleBatch:
        """The samples, some with other tokens; ignored targets stay ignored."""
        batch, seq_len = super().read(samples), self.dataset.seq_len
        for row, sample in enumerate(samples.tolist()):
            if sample in self.rows:
                start = self.rows[sample] * seq_len
                chosen = self.probe[np.arange(start, start + seq_len + 1) % len(self.probe)]
                batch.tokens[row] = chosen[:-1]
                batch.targets[row] = np.where(batch.targets[row] < 0, IGNORE_INDEX, chosen[1:])
        return batch


def probe_last_steps(trainer: Trainer, steps: int) -> int:
    """Make the last steps read every token, as far as the vocabulary needs them; the last step first.

    Returns:
        The number of tokens that are read.
    """
    model, batcher, train = trainer.job.model, trainer.data.train, trainer.job.train
    if not isinstance(model, DecoderModel) or not isinstance(batcher, Batcher):
        return 0
    tokens, rows, batch = order_tokens(model.vocab_size), dict[int, int](), train.global_batch
    for step in range(steps, FIRST_PROBE_STEP - 1, -1):
        for sample in trainer.data.order.samples_at(np.arange((step - 1) * batch, step * batch)).tolist():
            if len(rows) * trainer.job.data.seq_len < len(tokens):
                rows.setdefault(sample, len(rows))
    settings = {field.name: getattr(batcher, field.name) for field in dataclasses.fields(batcher)}
    batcher = ProbeBatcher(**settings, rows=rows, probe=tokens)
    prefetcher = BatchPrefetcher(trainer.data.order, batcher, batch, trainer.mesh.device)
    trainer.replace_data(dataclasses.replace(trainer.data, train=batcher, prefetcher=prefetcher))
    return min(len(rows) * trainer.job.data.seq_len, len(tokens))


@dataclass(frozen=True)
class _Probe:
    """Probes embedding and head with micro-batches of the run's shape."""

    trainer: Trainer
    shape: tuple[int, int]
    vocab_size: int

    def gather_rows(self, module: str, weight: Tensor) -> Tensor:
        """The full weight of a module; copied, because the stage gathers its own."""
        return self.trainer.rank_parameters.unshard(f"{module}.weight", full_tensor(weight)).clone()

    def find_wrong_inputs(self, embedding: nn.Embedding, rows: Tensor) -> Iterator[int]:
        """The tokens whose embedding is not their row of the weight."""
        for chunk in torch.arange(self.vocab_size).split(self.shape[0] * self.shape[1]):
            tokens = self._fill(chunk, 0, self.shape)
            found = embedding(tokens)
            if self.trainer.parallel.tp is not None:
                found = gather_full_activation(self.trainer.parallel.tp, EMBEDDING, "output", found)
            wrong = (found.flatten(0, 1) != rows[tokens.flatten()]).any(-1).nonzero().flatten()
            yield from tokens.flatten()[wrong].tolist()

    def find_wrong_targets(self, head: Head, rows: Tensor) -> Iterator[int]:
        """The targets whose loss is not that of the full weight; of the first tokens to be probed."""
        size = min(TARGETS, self.shape[1])
        for chunk in torch.from_numpy(order_tokens(self.vocab_size))[: MAX_CALLS * size].split(size):
            if self._is_wrong(head, rows, chunk):
                yield from (int(token) for token in chunk if self._is_wrong(head, rows, token.view(1)))

    def _is_wrong(self, head: Head, rows: Tensor, targets: Tensor) -> bool:
        """Whether the loss of some targets differs; the same result on all tensor-parallel ranks."""
        tp, generator = self.trainer.parallel.tp, torch.Generator().manual_seed(0)
        shape = (1, self.shape[1])  # one sequence: the loss of a whole micro-batch would take long
        x = torch.randn(*shape, rows.shape[1], generator=generator).to(rows.device)
        wanted = self._fill(targets, IGNORE_INDEX, shape)
        local = x
        if tp is not None and tp.sequence_parallel:
            tp.batch = shape
            local = x.flatten(0, 1).chunk(tp.size)[tp.rank]
        found = float(head.loss(local, wanted, wanted.numel()))
        if tp is not None:
            tp.batch = self.shape  # a stage without embedding does not set it
        logits = x.flatten(0, 1)[: len(targets)].double() @ rows.double().T
        expected = float(nn.functional.cross_entropy(logits, targets.to(rows.device), reduction="sum"))
        return not abs(found - expected) <= LOSS_TOLERANCE * abs(expected)

    def _fill(self, values: Tensor, rest: int, shape: tuple[int, int]) -> Tensor:
        """A micro-batch that begins with some values."""
        filled = nn.functional.pad(values, (0, shape[0] * shape[1] - len(values)), value=rest)
        return filled.view(shape).to(self.trainer.mesh.device)


@torch.no_grad()
def find_wrong_tokens(trainer: Trainer) -> dict[str, list[int]]:
    """The tokens whose embedding or loss is wrong, by module. Ranks of one stage call it together."""
    job, found = trainer.job, dict[str, list[int]]()
    if not isinstance(job.model, DecoderModel):
        return found
    shape = (job.layout.micro_batch or 1, job.data.seq_len // job.layout.cp)
    name = EMBEDDING if job.model.tied_embeddings else HEAD
    stages = [module for module in trainer.model.modules() if isinstance(module, Decoder)]
    probe = _Probe(trainer, shape, job.model.vocab_size)
    firsts = [(s.embed, probe.gather_rows(EMBEDDING, s.embed.weight)) for s in stages if s.first]
    lasts = [(s.head, probe.gather_rows(name, s.head.get_weight())) for s in stages if s.last]
    for stage in stages:  # a tied head reads the embedding of the first stage
        if is_sharded(stage):
            stage.unshard()
    for embedding, rows in firsts:
        found[EMBEDDING] = sorted(set(probe.find_wrong_inputs(embedding, rows)))
    for head, rows in lasts:
        found[HEAD] = list(probe.find_wrong_targets(head, rows))
    for stage in stages:
        if is_sharded(stage):
            stage.reshard()
    return {module: tokens for module, tokens in found.items() if tokens}
