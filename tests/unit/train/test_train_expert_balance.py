"""Expert load, the biases of the balancer, and replayed choices for tied scores."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from meshwright.models.decoder import Decoder
from meshwright.models.routing import AuxiliaryLosses
from meshwright.parallel.mesh import Mesh
from meshwright.spec.model import DecoderModel
from meshwright.train.expert_balance import ExpertBalancer, ExpertLoad, is_load_report_due, list_routers
from meshwright.verify.proof_task import TIE, routing_file
from meshwright.verify.routing_decisions import ReplayedRouting

MODEL = DecoderModel(
    num_layers=3, hidden_size=8, num_heads=2, num_kv_heads=2, ffn_size=8, vocab_size=16,
    num_experts=4, experts_per_token=2, dense_layers=1,
)  # fmt: skip
ALONE = Mesh(0, 1, torch.device("cpu"))


def test_biases_move_by_the_rate_towards_the_mean():
    balancer, network = ExpertBalancer(MODEL, 0.25, torch.device("cpu")), Decoder(MODEL, 4)
    balancer.attach(network, AuxiliaryLosses(0.5))
    routers = dict(list_routers(network))
    assert list(routers) == [1, 2], "the first layer has no experts"
    routers[2].load[:5] += torch.tensor([7.0, 1.0, 4.0, 4.0, 3.0], dtype=torch.float64)
    load = balancer.end_step(ALONE)
    assert routers[2].selection_bias.tolist() == [-0.25, 0.25, 0, 0]
    assert routers[1].selection_bias.tolist() == [0] * 4
    assert [row["layer"] for row in load.layer_rows()] == [1, 2]
    assert load.layer_rows()[1] == {"layer": 2, "load": [7, 1, 4, 4], "dropped": 3, "imbalance": 1.75}
    assert not balancer.sums.any(), "the sums are reset for the next step"
    assert routers[1].auxiliary.balance == 0.5
    routers[2].load[:5] += torch.tensor([7.0, 1.0, 4.0, 4.0, 3.0], dtype=torch.float64)
    balancer.end_step(ALONE, update_biases=False)
    assert routers[2].selection_bias.tolist() == [-0.25, 0.25, 0, 0], "of a bad step"
    assert not balancer.sums.any()


def test_imbalance_and_dropped_shares_of_a_step_are_computed():
    load = ExpertLoad(0, [[4.0, 4.0], [6.0, 2.0]], [0.0, 4.0], 1.5, 0.5)
    figures = {"expert_imbalance": 1.5, "expert_dropped": 0.25, "balance_loss": 1.5, "z_loss": 0.5}
    assert load.step_fields() == figures
    assert [step for step in range(1, 26) if is_load_report_due(step, 25)] == [1, 10, 20, 25]


@pytest.fixture
def replay(tmp_path):
    """A rank with one sample of two tokens and two micro-batches. The second micro-batch is padding."""
    network = Decoder(MODEL, 2)
    batches = SimpleNamespace(rank=1, ranks=2, micro_batch=1)
    job = SimpleNamespace(train=SimpleNamespace(global_batch=3))
    trainer = SimpleNamespace(model=network, data=SimpleNamespace(train=batches), job=job, step=4)
    reference = torch.tensor([[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[2, 0], [3, 1]]], dtype=torch.int32)
    save_file({"blocks.1.ffn": reference, "blocks.2.ffn": reference.clone()}, tmp_path / routing_file(1))
    return ReplayedRouting(trainer, tmp_path, TIE), dict(list_routers(network))


def test_tied_routing_scores_use_the_experts_of_the_reference(replay):
    """The rank's only real sample is the third. Its first token has tied scores, its second does not."""
    choices, routers = replay
    scores = torch.tensor([[0.5, 0.1, 0.1 + 5e-7, 0.1 - 1e-3], [0.1, 0.4, 0.2, 0.3]])
    chosen = torch.tensor([[0, 1], [1, 3]])
    routers[1].is_counting = True
    assert routers[1].choose(scores, chosen).tolist() == [[2, 0], [1, 3]]
    routers[1].is_counting = False
    assert routers[1].choose(scores, chosen).tolist() == [[2, 0], [1, 3]], (
        "recomputation gives the same choice"
    )
    assert choices.replayed == 1


def test_experts_outside_the_tie_are_not_replaced(replay):
    """The experts of the reference must be among the tied ones, so a wrong layout is not hidden."""
    choices, routers = replay
    scores = torch.tensor([[0.1, 0.5, 0.1, 0.1], [0.4, 0.1, 0.3, 0.3]])
    chosen = torch.tensor([[1, 0], [0, 2]])
    assert routers[1].choose(scores, chosen).tolist() == chosen.tolist()
    choices.micro_batch = 1
    assert routers[2].choose(scores, chosen).tolist() == chosen.tolist(), "padding samples are not replayed"
    assert choices.replayed == 0
