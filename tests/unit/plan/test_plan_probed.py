"""Steps built of probed times: a device that keeps a law is predicted by it; the rest of steps is fitted."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.choose import evaluate
from meshwright.plan.compute import flops_per_token, step_interval
from meshwright.plan.own_traffic import block_bytes
from meshwright.plan.probed_time import Timed, count_work, fit_steps, is_probed, list_linears, with_probed
from meshwright.plan.probing import PROGRAMMES, list_attention, list_products, list_runs
from meshwright.spec.probed import AttentionTime, Probed, ProductTime

H200_PRODUCTS = (
    (16384, 2560, 1536, 0.0001959, 0.0001829, 0.0001812),
    (16384, 12288, 1536, 0.0008975, 0.0008772, 0.0008601),
    (16384, 1536, 1536, 0.000116, 0.0001201, 0.0001191),
    (16384, 1536, 6144, 0.000448, 0.0004854, 0.000444),
    (4096, 32768, 1536, 0.0006237, 0.0005927, 0.0006186),
    (32768, 17920, 2560, 0.004347, 0.004404, 0.004483),
    (32768, 3584, 2560, 0.0009151, 0.0009031, 0.0009054),
    (32768, 2560, 8960, 0.002142, 0.002275, 0.002222),
    (16384, 5120, 3584, 0.0008935, 0.0008897, 0.0009117),
    (8192, 5120, 5120, 0.0006499, 0.0006471, 0.0006374),
    (16384, 28672, 4096, 0.005633, 0.005652, 0.005663),
    (16384, 4096, 14336, 0.002827, 0.002829, 0.002846),
    (4096, 98304, 2560, 0.003144, 0.002993, 0.003068),
    (2048, 1024, 1024, 1.362e-05, 1.2e-05, 2.614e-05),
    (1024, 512, 2048, 1.357e-05, 1.155e-05, 2.53e-05),
)
H200_ATTENTION = (
    (4, 12, 4, 128, 4096, 0.0003737, 0.001163),
    (8, 32, 8, 64, 2048, 0.000348, 0.001102),
    (2, 32, 8, 64, 8192, 0.001231, 0.003342),
    (8, 24, 8, 128, 2048, 0.0004084, 0.001292),
    (1, 24, 8, 128, 16384, 0.002638, 0.007782),
)
"""What a probe wrote on one NVIDIA H200, torch 2.11."""
RATE, ATTENTION_RATE, COPY, UPDATE = 7e14, 4e14, 4.2e12, 3e12


def product(rows, columns, depth, rate=RATE, precision="bf16"):
    seconds = 2.0 * rows * columns * depth / rate
    return ProductTime(precision, rows, columns, depth, seconds, seconds, seconds)


def attention(batch, heads, kv_heads, head_size, seq_len, rate=ATTENTION_RATE, precision="bf16"):
    seconds = 2.0 * batch * heads * seq_len**2 * head_size / rate
    return AttentionTime(precision, batch, heads, kv_heads, head_size, seq_len, seconds, 2.5 * seconds)


def lawful(**changes) -> Probed:
    """A device that multiplies, attends, copies and updates at one rate each, whatever the shape."""
    programme = PROGRAMMES["cuda"]
    probed = Probed(
        device="cuda",
        products=tuple(product(*sizes) for sizes in programme.products[:-2]),
        attention=tuple(attention(*heads) for heads in programme.attention),
        copy_bytes_per_s=COPY,
        optimizer_bytes_per_s=UPDATE,
        launch_s=1e-9,
        compiled=True,
    )
    return dataclasses.replace(probed, **changes)


@pytest.fixture
def job(make_job):
    """A Llama-like model that no probe has the shapes of, compiled on one H200."""
    sizes = {"num_layers": 12, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192}
    return make_job(
        model={"preset": None, **sizes, "vocab_size": 128256, "tied_embeddings": False},
        cluster={"preset": "h200-sxm", "devices_per_node": 1},
        data={"seq_len": 4096},
        train={"global_batch": 4, "precision": "bf16", "compile": True, "residual": "bf16"},
        layout={"dp_replicate": 1, "micro_batch": 4, "recompute": "selective"},
    )


def test_shapes_that_were_not_probed_have_the_rate_of_those_that_were(job):
    work = count_work(with_probed(job, lawful()), 1, 0)
    tokens, model = 4 * 4096, job.model
    seen = 6.0 * model.num_layers * 4096 / 2 * 2 * model.query_size
    products = flops_per_token(model, 4096) - seen - 6.0 * (2 * model.num_layers + 1) * model.hidden_size
    assert work.products_s == pytest.approx(tokens * products / RATE, rel=1e-3)
    # The backward pass of attention is five products for the two of the forward pass.
    assert work.attention_s == pytest.approx(tokens * seen / 3 * 3.5 / ATTENTION_RATE, rel=1e-3)
    assert work.update_s == pytest.approx(1.2e9 * 30 / UPDATE, rel=0.05)


def test_a_probed_shape_takes_what_it_took(job):
    """However far that is from its neighbours."""
    linear = next(iter(list_linears(job, job.model, 1)))
    slow = product(linear.rows, linear.columns, linear.depth, RATE / 3)
    before, after = lawful(), lawful(products=(*lawful().products, slow))
    took = 3 * 2.0 * linear.rows * linear.columns * linear.depth / RATE * linear.times
    more = count_work(with_probed(job, after), 1, 0).products_s
    more -= count_work(with_probed(job, before), 1, 0).products_s
    assert 1.98 * took < more < 4 * took, "its own time, and a little of its neighbours'"


def test_a_joint_product_is_counted_where_a_run_joins(job):
    joined = {linear.columns for linear in list_linears(job, job.model, 1)}
    assert {2048 + 2 * 512, 2 * 8192, 2048, 128256} == joined
    eager = dataclasses.replace(job, train=dataclasses.replace(job.train, compile=False))
    assert {2048, 512, 8192, 128256} == {linear.columns for linear in list_linears(eager, job.model, 1)}


def test_the_head_is_counted_in_the_chunks_of_the_loss(job):
    odd = dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=3000))
    rows = [linear for linear in list_linears(odd, job.model, 2) if linear.columns == 128256]
    assert sum(linear.rows * linear.times for linear in rows) == 2 * 4 * 3000
    assert {linear.rows for linear in rows} == {8192, 4 * 3000 % 8192}


def test_recomputation_costs_the_forward_pass_of_blocks_or_what_is_cheap(job):
    def work(recompute):
        layout = dataclasses.replace(job.layout, recompute=recompute)
        return count_work(with_probed(dataclasses.replace(job, layout=layout), lawful()), 1, 0)

    none, selective, full = map(work, ("none", "selective", "full"))
    assert none.products_s == selective.products_s < full.products_s
    assert none.moved_s < selective.moved_s < full.moved_s
    assert full.attention_s == pytest.approx(none.attention_s * 4.5 / 3.5)


def test_a_stream_in_16_bits_moves_less(job):
    wide = dataclasses.replace(job, train=dataclasses.replace(job.train, residual="fp32"))
    narrow_s, wide_s = (count_work(with_probed(j, lawful()), 1, 0).moved_s for j in (job, wide))
    assert 1.1 < wide_s / narrow_s < 1.6


def test_bytes_of_our_own_kernels_by_hand(job):
    """Each pass of a block once: what it reads and what it writes of a token, in bytes."""
    width, inner, turned, all_heads = 2048, 8192, 2048 + 512, 2048 + 2 * 512
    norms = 2 * (2 * 2 + 2 * 2) * width
    forward = norms + 2 * 2 * turned + 3 * 2 * inner
    backward = 2 * (4 * 2 + 2) * width + 6 * 2 * inner + 2 * 2 * all_heads
    assert block_bytes(job, job.model) == forward + backward
    none = dataclasses.replace(job, layout=dataclasses.replace(job.layout, recompute="none"))
    assert block_bytes(job, job.model) - block_bytes(none, job.model) == 2 * (2 * width + inner)
    wide = dataclasses.replace(job, train=dataclasses.replace(job.train, residual="fp32"))
    assert block_bytes(wide, job.model) - block_bytes(job, job.model) == 2 * (5 * 2 + 2) * width
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    cast = 3 * 2048 - 2 * width - inner
    assert block_bytes(fp8, job.model) - block_bytes(job, job.model) == cast
    full = dataclasses.replace(job, layout=dataclasses.replace(job.layout, recompute="full"))
    first = forward - 2 * 2 * width  # its norm reads the stream alone, and does not write it
    assert block_bytes(full, job.model) == 2 * first + 3 * 2 * width + backward


def test_whose_kernels_move_them_decides_how_long_that_takes(job):
    probed = lawful(elementwise=1.6, own_elementwise=1.1)
    compiled = dataclasses.replace(job, train=dataclasses.replace(job.train, kernels="compiled"))
    for which, longer in ((job, 1.1), (compiled, 1.6)):
        work = count_work(with_probed(which, probed), 1, 0)
        left_s = work.compute_s(probed) - work.products_s - work.attention_s
        assert left_s == pytest.approx(longer * work.moved_s)


def test_products_in_8_bits_have_times_of_their_own(job):
    """Those of blocks; the head's and attention stay in 16 bits. Without such times nothing is promised."""
    fp8 = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="fp8"))
    assert not is_probed(with_probed(fp8, lawful()))
    twice = tuple(product(*sizes, rate=2 * RATE, precision="fp8") for sizes in PROGRAMMES["cuda"].scaled[:-1])
    probed = lawful(products=(*lawful().products, *twice))
    assert is_probed(with_probed(fp8, probed))
    compiled = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, kernels="compiled"))
    assert not is_probed(with_probed(compiled, probed))
    whole = dataclasses.replace(fp8, train=dataclasses.replace(fp8.train, weight_gradients="fp8"))
    in_16, two, three = (count_work(with_probed(which, probed), 1, 0) for which in (job, fp8, whole))
    head_s = 6.0 * 4 * 4096 * 128256 * 2048 / RATE
    assert three.products_s - head_s == pytest.approx((in_16.products_s - head_s) / 2, rel=1e-2)
    assert two.products_s - head_s == pytest.approx((in_16.products_s - head_s) * 2 / 3, rel=1e-2)
    assert three.attention_s == in_16.attention_s


def test_products_whose_algorithms_raced_take_less(job):
    """All of 16 bits, the head's among them."""
    raced = dataclasses.replace(job, train=dataclasses.replace(job.train, products="raced"))
    before, after = (count_work(with_probed(which, lawful()), 1, 0) for which in (job, raced))
    assert after.products_s == pytest.approx(0.98 * before.products_s)
    assert after.attention_s == before.attention_s


def test_two_models_on_an_h200_took_what_is_predicted_of_other_shapes(job):
    """Probed on 15 Nov 2026, before these kernels; measured on 16 Nov: 495.5 and 626.4 ms."""
    probed = lawful(
        products=tuple(ProductTime("bf16", *row) for row in H200_PRODUCTS),
        attention=tuple(AttentionTime("bf16", *row) for row in H200_ATTENTION),
        copy_bytes_per_s=4.25e12,
        optimizer_bytes_per_s=3.48e12,
        launch_s=8.044e-06,
        multiprocessors=132,
    )
    for layers, width, heads, batch, measured_s in ((16, 2048, 32, 8, 0.4955), (28, 3072, 24, 4, 0.6264)):
        model = dataclasses.replace(job.model, num_layers=layers, hidden_size=width, num_heads=heads)
        layout = dataclasses.replace(job.layout, micro_batch=batch)
        shape = with_probed(dataclasses.replace(job, model=model, layout=layout), probed)
        assert count_work(shape, 1, 0).total_s(probed) == pytest.approx(measured_s, rel=0.03)


def test_the_host_is_hidden_behind_a_gpu_and_added_on_a_core(job):
    probed = lawful(block_s=1e-3, step_s=0.5)
    on_gpu = count_work(with_probed(job, probed), 1, 0)
    alone = on_gpu.total_s(lawful())
    assert on_gpu.total_s(probed) == pytest.approx(alone + 0.5)
    busy = lawful(block_s=1.0)
    assert on_gpu.total_s(busy) == pytest.approx(job.model.num_layers + on_gpu.update_s)
    on_core = dataclasses.replace(on_gpu, hides_host=False)
    assert on_core.total_s(busy) == pytest.approx(alone + job.model.num_layers)


def test_the_plan_of_a_probed_device_has_its_time_and_interval(job):
    """And without the table the calibrated estimate."""
    probed = with_probed(job, lawful())
    step = evaluate(probed, probed.layout).time
    assert step.total_s == pytest.approx(count_work(probed, 1, 0).total_s(lawful()))
    assert "probe" in step_interval(probed).basis
    assert "probe" not in step_interval(job).basis
    assert evaluate(job, job.layout).time.total_s != step.total_s


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"compile": False}),
        ("train", {"precision": "fp32", "residual": "fp32"}),
        ("train", {"runtime": "torchtitan"}),
        ("train", {"precision": "fp8"}),
        ("train", {"compile_backend": "aot_eager"}),
        ("data", {"mask": "document"}),
        ("layout", {"tp": 2}),
        ("layout", {"dp_replicate": 2}),
        ("layout", {"offload": "optimizer"}),
        ("model", {"num_experts": 4, "experts_per_token": 2}),
        ("cluster", {"probed": None}),
    ],
)
def test_what_was_not_probed_is_not_predicted_from_it(job, section, changes):
    probed = with_probed(job, lawful())
    assert is_probed(probed)
    changed = dataclasses.replace(getattr(probed, section), **changes)
    assert not is_probed(dataclasses.replace(probed, **{section: changed}))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_left_of_real_steps_is_found_again(make_job, device):
    """Steps of the small models, made up of planted figures."""
    programme, preset = PROGRAMMES[device], {"cuda": "h200-sxm", "cpu": "local"}[device]
    cluster = dataclasses.replace(make_job(cluster={"preset": preset}).cluster, device=device)
    runs = list_runs(programme, dataclasses.replace(cluster, devices_per_node=1))
    jobs = [run.plan.job for run in runs]
    law = {"precision": programme.precision}
    plain = Probed(
        device=device,
        products=tuple(product(*sizes, **law) for sizes in list_products(programme, jobs)),
        attention=tuple(attention(*heads, **law) for heads in list_attention(programme, jobs)),
        copy_bytes_per_s=COPY,
        optimizer_bytes_per_s=UPDATE,
        launch_s=1e-9,
        compiled=programme.compiled,
    )
    planted = dataclasses.replace(
        plain, elementwise=1.3, step_s=2e-3, block_s=2e-3 if device == "cpu" else 0.0
    )
    timed = []
    for run in runs:
        work = count_work(with_probed(run.plan.job, planted), 1, run.touched_bytes)
        timed.append(run.timed(work.total_s(planted)))
    found = fit_steps(plain, timed)
    assert found.elementwise == pytest.approx(1.3, rel=1e-2)
    assert (found.step_s, found.block_s) == pytest.approx((planted.step_s, planted.block_s), rel=1e-2)


def test_steps_shorter_than_their_products_leave_nothing_negative(job):
    work = count_work(with_probed(job, lawful()), 1, 0)
    found = fit_steps(lawful(), [Timed(job, 1, 0, work.products_s / 2)])
    assert found.elementwise > 0
    assert (found.step_s, found.block_s) == (0, 0)
