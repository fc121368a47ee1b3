"""Checks of one rank name the module whose output or gradient is the first that is not finite."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel.build import build_model
from meshwright.spec.load import build_job
from meshwright.train.finite_checks import FiniteChecks

NAN = float("nan")
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
RESNET = {"preset": "resnet-tiny"}


def make(model=None, **layout):
    """A small model in one process and a micro-batch for it."""
    images = model is RESNET
    tree = {
        "name": "checks",
        "model": RESNET if images else {"preset": "tiny", **(model or {})},
        "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 1},
        "data": {"path": "images"} if images else {"path": "text", "seq_len": 8},
        "train": {"steps": 2, "global_batch": 2},
        "layout": {"micro_batch": 2, **layout},
    }
    job = build_job(tree)
    network = build_model(job, torch.device("cpu"))
    if images:
        batch = (torch.randn(2, 3, job.model.image_size, job.model.image_size), torch.tensor([0, 1]))
        return network, batch
    tokens = torch.arange(16).view(2, 8)
    return network, (tokens, tokens, None, torch.tensor([[0.5, 8.0]] * 2) if model else None)


def find(network, batch):
    """The first finding of one forward and backward pass, in micro-batch 3."""
    checks = FiniteChecks(network)
    checks.before_forward(3)
    loss = network(*batch)
    checks.after_forward()
    checks.before_backward(3)
    loss.backward()
    checks.remove()
    checks.check_gradients(network)
    return checks.first


def facts(finding):
    return finding.module, finding.what, finding.value, finding.near


@pytest.mark.parametrize("model", [None, EXPERTS, RESNET], ids=["dense", "experts", "resnet"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_finite_step_has_no_finding(model, recompute):
    """And the hooks change the gradients by rounding only."""
    network, batch = make(model, recompute=recompute)
    network(*batch).backward()
    expected = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    assert find(network, batch) is None
    for parameter, before in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, before)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_bad_weight_is_named_with_its_module(recompute):
    network, batch = make(recompute=recompute)
    with torch.no_grad():
        network.blocks["1"].attention.wk.weight[0, 0] = float("inf")
    found = find(network, batch)
    assert (found.module, found.what) == ("blocks.1.attention.wk", "output")
    assert found.weights == ("blocks.1.attention.wk.weight",)
    assert found.micro_batch == 3


def test_a_bad_row_of_an_embedding_counts_if_its_token_is_read():
    network, (tokens, *others) = make()
    with torch.no_grad():
        network.embed.weight[200] = NAN
    network.head.weight = torch.nn.Parameter(torch.zeros_like(network.head.weight))
    assert find(network, (tokens, *others)) is None
    assert find(network, (tokens + 190, *others)).module == "embed"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_arithmetic_between_modules_is_named_by_the_module_around_it(recompute):
    """Attention itself is no module: its input is finite, and that of the output projection is not."""
    network, batch = make(recompute=recompute)
    network.blocks["0"].attention.context.attend = lambda q, k, v, mask: q * NAN
    assert facts(find(network, batch)) == ("blocks.0.attention", "input", "NaN", "before wo")


def test_an_infinite_loss_is_named_by_the_head():
    network, batch = make()
    network.head.loss = lambda x, targets, chunk: x.sum() * float("inf")
    found = find(network, batch)
    assert (found.module, found.what) == ("head", "output")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_gradient_is_named_by_the_module_whose_backward_pass_made_it(recompute):
    network, batch = make(recompute=recompute)
    module = network.blocks["0"].attention.wv  # wq and wk read the same input
    module.register_full_backward_hook(lambda _, grads, __: (grads[0] * NAN,))
    assert facts(find(network, batch)) == ("blocks.0.attention.wv", "input gradient", "NaN", "")


def test_the_gradient_of_a_weight_is_named():
    network, batch = make()
    network.blocks["1"].ffn_norm.weight.register_hook(lambda grad: grad * NAN)
    found = find(network, batch)
    assert facts(found) == ("blocks.1.ffn_norm", "weight gradient", "NaN", "weight")


def test_a_gradient_that_only_the_reduction_broke_is_named():
    network, batch = make()

    def spoil(parameter):
        parameter.grad.fill_(NAN)

    network.embed.weight.register_post_accumulate_grad_hook(spoil)
    found = find(network, batch)
    assert (found.module, found.what, found.near) == ("embed", "weight gradient", "embed.weight")


def test_experts_routers_and_images_are_checked():
    network, batch = make(EXPERTS)
    with torch.no_grad():
        network.blocks["1"].ffn.router.weight.fill_(NAN)
    assert find(network, batch).module == "blocks.1.ffn.router"
    network, (images, labels) = make(RESNET)
    images[0, 0, 0, 0] = NAN
    assert find(network, (images, labels)).module == "data"
    network, batch = make(RESNET)
    with torch.no_grad():
        network.head.weight[0] = NAN
    assert find(network, batch).module == "head"
