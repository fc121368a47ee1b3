"""Random initial weights of a model: a rank's shard, drawn in blocks, against the whole model on one thread.

The whole model is what each rank drew until November 2026: one generator per parameter, on one thread. Prints
seconds and ratios for a whole model and for one of several ZeRO-3 shards, with one thread and with several.
With a GPU the copies to it are included. Last, the weights of a run that resumes, which a checkpoint
overwrites: zeros that are copied to the device, as until then, and zeros that are allocated there.

    python benchmarks/initial_weights.py
    python benchmarks/initial_weights.py --model llama3-8b --threads 16    # needs 32 GB
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import time

import torch

from meshwright.layout.parameters import list_parameters
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill
from meshwright.models.weight_source import RandomWeights, WeightSource, ZeroWeights, parameter_seed
from meshwright.spec.load import load_job
from meshwright.spec.model import DecoderModel

SHARDS = (1, 8, 64)
SEED = 0


def draw_whole(model: DecoderModel, device: torch.device) -> float:
    """Seconds for all parameters, each from one generator on one thread."""
    kept, began = [], time.perf_counter()
    for parameter in list_parameters(model):
        if len(parameter.shape) > 1:
            generator = torch.Generator().manual_seed(parameter_seed(SEED, parameter.name))
            values = torch.empty(parameter.shape).normal_(0.0, model.init_std, generator=generator)
            kept.append(values.to(device))
    _wait(device)
    return time.perf_counter() - began


class CopiedZeros(ZeroWeights):
    """Zeros that are made on the CPU and copied, as any other weights."""

    is_zero = False


def fill_shard(model: DecoderModel, device: torch.device, shards: int, weights: WeightSource) -> float:
    """Seconds for the first of several shards of rows."""
    with torch.device("meta"):
        network = Decoder(model, 128)
    began = time.perf_counter()
    fill(network, [name for name, _ in network.named_parameters()], weights, device, 0, shards)
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Time them one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b", help="a model preset")
    parser.add_argument("--threads", type=int, default=2, help="threads besides one")
    options = parser.parse_args()
    model = load_job(options.model, on="h100-sxm", to_run=False).model
    assert isinstance(model, DecoderModel), "a decoder"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = sum(math.prod(parameter.shape) for parameter in list_parameters(model))
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(f"{datetime.date.today()}, {where}, {options.model}: {size / 1e9:.2f} G parameters")
    whole = draw_whole(model, device)
    print(f"  whole, one generator per parameter   {whole:7.2f} s")
    for threads in sorted({1, options.threads}):
        for shards in SHARDS:
            taken = fill_shard(model, device, shards, RandomWeights(model, SEED, threads))
            ratio = f"{whole / taken:5.1f} times faster"
            print(f"  1 of {shards:2} shards, {threads:2} threads           {taken:7.2f} s, {ratio}")
    copied, allocated = (fill_shard(model, device, 1, kind(model)) for kind in (CopiedZeros, ZeroWeights))
    ratio = f"{copied / allocated:.1f} times faster"
    print(f"  resumed: copied {copied:.2f} s, allocated on the device {allocated:.2f} s, {ratio}")


if __name__ == "__main__":
    main()
