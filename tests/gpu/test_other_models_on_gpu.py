"""ResNets, Hugging Face folders and instruction data on one GPU, with the job files of the CPU tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = ("cluster.device=cuda", "cluster.devices_per_node=1")
IMAGES = """
name = "images"
[model]
preset = "{preset}"
[data]
path = "builtin:synthetic-images"
[train]
steps = 4
global_batch = {batch}
lr = 3e-3
warmup = 2
eval_samples = 16
[cluster]
device = "cpu"
devices_per_node = 2
matmul_flops_per_s = 1e11
"""


def test_a_resnet_run_has_the_losses_of_a_cpu_run(train, job_file):
    """float32 on both, within 0.2%, as convolutions may use TF32. The audit passes."""
    job_file.write_text(IMAGES.format(preset="resnet-tiny", batch=12))
    on_cpu = train("layout.dp_replicate=1", "run_dir=cpu")
    on_gpu = train(*ON_GPU, "run_dir=gpu")
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("norm", "recompute"), [("group", "none"), ("batch", "none"), ("group", "full")])
def test_resnet50_matches_its_plan(train, job_file, precision, norm, recompute):
    job_file.write_text(IMAGES.format(preset="resnet50", batch=32))
    settings = (f"train.precision={precision}", f"model.norm={norm}", f"layout.recompute={recompute}")
    result = train(*ON_GPU, *settings).result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]


def test_an_exported_folder_loads_in_transformers_and_starts_a_run(train, job_file, tmp_path):
    """GPU and CPU runs that start from the folder have equal losses; transformers gives finite logits."""
    transformers = pytest.importorskip("transformers")
    trained = train(*ON_GPU, "train.steps=2", "run_dir=first")
    folder = tmp_path / "folder"
    export_checkpoint(Path(trained.result["checkpoint"]), folder, "float32", 100_000)
    job_file.write_text(job_file.read_text().replace('preset = "tiny"', f'hf = "{folder}"'))
    on_gpu = train(*ON_GPU, "train.steps=2", "run_dir=gpu")
    on_cpu = train("layout.dp_replicate=1", "train.steps=2", "run_dir=cpu")
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    assert model(torch.arange(8, device="cuda")[None]).logits.isfinite().all()


def test_prompt_masking_on_the_gpu_has_the_losses_of_a_cpu_run(train, job_file, tmp_path):
    rows = [{"prompt": f"what is {n} plus {n}?", "answer": f"it is {2 * n}"} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    lines = [
        f'path = "{tmp_path / "rows.jsonl"}"' if line.startswith("path") else line
        for line in job_file.read_text().splitlines()
    ]
    job_file.write_text("\n".join(lines))
    settings = ("data.prompt_masking=true", "data.template=plain", "data.mask=document", "data.seq_len=64")
    on_cpu = train(*settings, "layout.dp_replicate=1", "run_dir=cpu")
    on_gpu = train(*settings, *ON_GPU, "run_dir=gpu")
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)
