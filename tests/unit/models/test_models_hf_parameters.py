"""Import and export of Hugging Face folders, compared with transformers."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported: no test asks the network

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

from meshwright.checkpoint.drafts import new_draft  # noqa: E402
from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: E402
from meshwright.checkpoint.hf.source import SOURCE_FILE, read_hf_folder  # noqa: E402
from meshwright.checkpoint.manifest import Manifest, TensorFacts  # noqa: E402
from meshwright.checkpoint.tensor_files import WriteItem  # noqa: E402
from meshwright.checkpoint.writer import CheckpointWrite  # noqa: E402
from meshwright.core.errors import UserError  # noqa: E402
from meshwright.data.hf_tokenizer import hf_tokenizer_text  # noqa: E402
from meshwright.data.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer  # noqa: E402
from meshwright.layout.state_chunks import TensorSlice  # noqa: E402
from meshwright.models.init import find_weight_source  # noqa: E402
from meshwright.parallel.build import build_model  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.train.generate import GenerateTask, generate_text, load_model  # noqa: E402

SEQ_LEN = 96
TOKENS = {"bos_token_id": None, "eos_token_id": None}
LLAMA = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **TOKENS,
}
GPT2 = {"vocab_size": 320, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128, **TOKENS}
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", LLAMA),
    "tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "biased": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "scaled rope": ("Llama", {**LLAMA, "rope_parameters": SCALED_ROPE}),
    "long": (
        "Llama",
        {
            **LLAMA,
            "max_position_embeddings": 4096,
            "rope_parameters": {**SCALED_ROPE, "original_max_position_embeddings": 512},
        },
    ),
    "wide heads": ("Llama", {**LLAMA, "head_dim": 16}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": SEQ_LEN}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 64}),
    "gpt2 gelu": ("GPT2", {**GPT2, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
}
HEADS = {
    "Llama": "LlamaForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "GPT2": "GPT2LMHeadModel",
}

Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def saved(tmp_path) -> Save:
    """``saved("gpt2", max_shard_size="20KB")``: a random model of transformers and its folder."""

    def save(kind: str, **options: Any) -> tuple[Any, Path]:
        name, settings = KINDS[kind]
        torch.manual_seed(1)
        model = getattr(transformers, HEADS[name])(getattr(transformers, f"{name}Config")(**settings)).eval()
        with torch.no_grad():  # zero biases and norms of one would hide errors
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        folder = tmp_path / "folder"
        model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
        # Load it again: otherwise the RoPE frequencies would be rounded with the weights.
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder

    return save


@pytest.fixture
def job_of(job_file) -> Callable[..., Any]:
    """The job that starts from a folder."""
    text = job_file.read_text().replace('preset = "tiny"', 'hf = "HF"').replace("seq_len = 32", "")

    def build(folder: Path):
        job_file.write_text(text.replace("HF", str(folder)).replace("[data]", f"[data]\nseq_len = {SEQ_LEN}"))
        return load_job(str(job_file))

    return build


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of either kind of model."""
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def random_tokens() -> torch.Tensor:
    """Two random sequences."""
    return torch.randint(0, 320, (2, SEQ_LEN), generator=torch.Generator().manual_seed(2))


def assert_same_logits(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(
        logits_of(ours, random_tokens()), logits_of(theirs, random_tokens()), atol=1e-5, rtol=1e-5
    )


def build_from_hf(job: Any) -> Any:
    """The Meshwright model with the weights of the job's folder."""
    return build_model(job, torch.device("cpu"), find_weight_source(job, from_hf=True))


def checkpoint_of(model: Any, job: Any, root: Path) -> Path:
    """A checkpoint of a model, with the byte tokenizer and the files of its folder."""
    root.mkdir()
    ByteTokenizer().save(root)
    files = {"tokenizer.json": (root / "tokenizer.json").read_bytes()}
    files[SOURCE_FILE] = read_hf_folder(job.model).to_zip()
    manifest = Manifest(
        step=7,
        position=0,
        world_size=1,
        model=dataclasses.asdict(job.model),
        train={},
        seq_len=SEQ_LEN,
        data_sha256="",
        buckets=[],
    )
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    facts = {name: TensorFacts("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    parts = [
        WriteItem(name, TensorSlice.full(facts[name].shape), facts[name].shape, t)
        for name, t in tensors.items()
    ]
    write = CheckpointWrite(
        new_draft(root, 7, 0), 0, parts, dataclasses.replace(manifest, tensors=facts), files
    )
    write.start()
    write.wait()
    assert write.path is not None, write.error
    return write.path


@pytest.mark.parametrize("kind", KINDS)
def test_imported_model_has_the_logits_of_transformers(saved, job_of, kind):
    """Logits of all positions, also with scaled RoPE, agree within 1e-5 in float32.

    Parameters are contiguous.
    """
    theirs, folder = saved(kind)
    ours = build_from_hf(job_of(folder))
    assert all(parameter.is_contiguous() for parameter in ours.parameters())
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(saved, job_of, value):
    """The query part of GPT-2's joint projection: the error has the name in the file."""
    _, folder = saved("gpt2")
    weights, name = load_file(folder / "model.safetensors"), "transformer.h.1.attn.c_attn.weight"
    weights[name][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    job = job_of(folder)
    with pytest.raises(UserError) as caught:
        build_model(job, torch.device("cpu"), find_weight_source(job, from_hf=True))
    (problem,) = caught.value.problems
    assert problem.code == "model-hf-weights-not-finite"
    assert name in problem.rule


def test_scaled_rope_of_long_sequences_matches_transformers(saved, job_of):
    """The sequence has 2,048 positions, four times the original maximum."""
    theirs, folder = saved("long")
    job = dataclasses.replace(job_of(folder), data=dataclasses.replace(job_of(folder).data, seq_len=2048))
    ours = build_from_hf(job)
    tokens = torch.randint(0, 320, (1, 2048), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bf16_and_fp16_shards_are_loaded_as_float32(saved, job_of, kind, dtype):
    """The values are exactly those that transformers loads."""
    theirs, folder = saved(kind, max_shard_size="20KB", dtype=dtype)
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = build_from_hf(job_of(folder))
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_import_and_export_are_bit_identical(saved, job_of, tmp_path, kind):
    """The exported config describes the same model, with the same logits."""
    theirs, folder = saved(kind)
    job = job_of(folder)
    ours = build_from_hf(job)
    out = tmp_path / "out"
    export_checkpoint(checkpoint_of(ours, job, tmp_path / "run"), out, "float32", 10**9)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert_same_logits(again, theirs)
    assert job_of(out).model == dataclasses.replace(job.model, hf=str(out))


def test_export_in_shards_and_bf16(saved, job_of, tmp_path):
    """No file exceeds the limit and the index names all files. bf16 weights are rounded float32 weights."""
    theirs, folder = saved("gpt2")
    job = job_of(folder)
    ours = build_from_hf(job)
    out = tmp_path / "out"
    done = export_checkpoint(checkpoint_of(ours, job, tmp_path / "run"), out, "bfloat16", 30_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert set(index["weight_map"].values()) == {p.name for p in shards}
    assert index["metadata"]["total_size"] == done.bytes
    loaded = {name: tensor for p in shards for name, tensor in load_file(p).items()}
    for p in shards:
        held = load_file(p).values()
        assert len(held) == 1 or sum(t.numel() * 2 for t in held) <= 30_000
    reference = load_file(folder / "model.safetensors")
    assert loaded.keys() == reference.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, reference[name].bfloat16()), name
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16
    assert_same_logits(again.float().eval(), theirs.bfloat16().float())


def test_export_of_weights_beyond_the_fp16_range_is_refused(saved, job_of, tmp_path):
    _, folder = saved("grouped")
    job = job_of(folder)
    ours = build_from_hf(job)
    with torch.no_grad():
        ours.norm.weight.fill_(1e6)
    checkpoint = checkpoint_of(ours, job, tmp_path / "run")
    with pytest.raises(UserError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out", "float16", 10**9)
    assert caught.value.problems[0].code == "export-dtype-range"
    assert "model.norm.weight" in caught.value.problems[0].rule
    assert not list(tmp_path.glob("*out*")), "nothing is left behind"


def test_files_of_older_transformers_versions_load(saved, job_of):
    """Buffers are skipped. The prefix of a base model and a tied head under the other name are accepted."""
    theirs, folder = saved("gpt2")
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["lm_head.weight"] = old.pop("wte.weight")
    old["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, folder / "model.safetensors")
    assert_same_logits(build_from_hf(job_of(folder)), theirs)


TEXTS = ["", " ", "hello world", "  tab\t\n\nend ", "\x00\x7f\xad é 漢字 😀", "it's 3.14 a.b"]


@pytest.mark.parametrize("text", TEXTS)
def test_exported_byte_tokenizer_loads_in_transformers(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs(text)["input_ids"] == ByteTokenizer().encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    ours = load_tokenizer(tmp_path)
    assert (ours.encode(text), ours.vocab_size, ours.end_of_document) == (
        ByteTokenizer().encode(text),
        257,
        256,
    )


def test_generate_runs_a_hf_folder(saved):
    """`generate` takes a Hugging Face folder as it is."""
    theirs, folder = saved("grouped")
    (folder / "tokenizer.json").write_text(hf_tokenizer_text(ByteTokenizer()), encoding="utf-8")
    assert_same_logits(load_model(GenerateTask(str(folder))), theirs)
    greedy = generate_text(GenerateTask(str(folder), "abc", tokens=4, temperature=0.0, top_k=0))
    ids = ByteTokenizer().encode("abc")
    for _ in range(4):
        ids.append(int(logits_of(theirs, torch.tensor([ids]))[0, -1, :257].argmax()))
    assert greedy == ByteTokenizer().decode(ids[3:])


def test_exported_training_run_loads_in_transformers(train, corpus, tmp_path):
    """The run has a trained BPE tokenizer. transformers has the same logits and tokens."""
    trained = train(f"data.path={corpus}", "data.tokenizer=bpe:320", "model.vocab_size=384", "train.steps=2")
    out = tmp_path / "out"
    checkpoint = Path(trained.result["checkpoint"])
    export_checkpoint(checkpoint, out, "float32", 10**9)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ours = load_model(GenerateTask(str(checkpoint)))
    tokens = torch.randint(0, 320, (2, 32))
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens), atol=1e-5, rtol=1e-5)
    tokenizer, mine = transformers.AutoTokenizer.from_pretrained(out), load_tokenizer(checkpoint)
    assert isinstance(mine, BpeTokenizer)
    for text in [*TEXTS, "document 3 line 4: the quick brown fox"]:
        assert tokenizer(text)["input_ids"] == mine.encode(text)
    assert tokenizer.eos_token_id == mine.end_of_document == theirs.config.eos_token_id
    assert theirs.generation_config.eos_token_id == mine.end_of_document
