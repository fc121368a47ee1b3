"""A Hugging Face folder is unchanged after import and export, as transformers reads it.

The runs train one step with a learning rate that changes no float32 weight. The source folder is removed
before the export.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests do not use the network

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: E402
from meshwright.data.chat import Conversation, Message, read_conversation  # noqa: E402
from meshwright.data.chat_templates import load_template  # noqa: E402
from meshwright.data.prompt import encode_prompt  # noqa: E402
from meshwright.data.tokenizer import BpeTokenizer, load_tokenizer  # noqa: E402
from model_shapes import HF_FAMILIES  # noqa: E402

MARKERS = ("<|im_start|>", "<|im_end|>", "<pad>", "<s>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNCHANGED = ("layout.dp_replicate=1", "train.steps=1", "train.lr=1e-30", "train.weight_decay=0.0")
MESSAGES = [{"role": "user", "content": "the quick brown fox"}, {"role": "assistant", "content": "line 3"}]


def write_source(family: str, folder: Path, corpus: Path, dtype: torch.dtype = torch.float32) -> None:
    """A random model of transformers with a chat tokenizer and a list of eos ids."""
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))[:8]]
    trained = BpeTokenizer.train(texts, 340, MARKERS)
    folder.mkdir()
    (folder / "raw.json").write_text(trained.serialized)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        padding_side="left",
        chat_template=CHAT,
    )
    (folder / "raw.json").unlink()
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ends = [tokenizer.eos_token_id, trained.special_tokens["<|endoftext|>"]]
    name, settings = HF_FAMILIES[family]
    torch.manual_seed(1)
    of_class = getattr(transformers, name)
    model = of_class(of_class.config_class(vocab_size=384, eos_token_id=ends, **ids, **settings))
    model.generation_config.update(max_new_tokens=12, repetition_penalty=1.3, eos_token_id=ends, **ids)
    with torch.no_grad():  # no zeros: even the smallest update would change them
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(folder)
    (folder / "LICENSE").write_text("You may use it.")
    (folder / "README.md").write_text("This describes another model.")


def import_and_export(train, use_hf_folder, corpus: Path, folder: Path, *overrides: str, dtype=None) -> Path:
    """Train on the folder's own tokenizer without changing a weight, remove the folder, export."""
    use_hf_folder(folder)
    run = train(*UNCHANGED, f"data.path={corpus}", *overrides)
    shutil.move(folder, folder.with_name("moved"))
    export_checkpoint(Path(run.result["checkpoint"]), folder.with_name("out"), dtype, 10**9)
    return folder.with_name("out")


def answers(folder: Path) -> dict[str, Any]:
    """What a user of the folder gets from transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = tokenizer(
        ["the quick", "document 3 line 4: the quick brown fox"], padding=True, return_tensors="pt"
    )
    generated = model.generate(**batch, do_sample=False)
    with torch.no_grad():
        logits = model(**batch).logits
    return {
        "class": type(model).__name__,
        "dtype": model.dtype,
        "config": {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"},
        "generation config": model.generation_config.to_dict(),
        "chat": tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True),
        "chat ids": tokenizer.apply_chat_template(MESSAGES)["input_ids"],
        "special tokens": tokenizer.special_tokens_map,
        "padding": {key: value.tolist() for key, value in batch.items()},
        "generated": generated.tolist(),
        "text": tokenizer.batch_decode(generated),
        "logits": logits.tolist(),
    }


@pytest.mark.parametrize(
    "family", ["mistral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "mixtral", "gpt2"))]
)
def test_the_exported_folder_equals_the_source_in_transformers(
    train, use_hf_folder, corpus, tmp_path, family
):
    """Equal class, configs, chat template, padding, generated text, logits, and bytes of small files."""
    write_source(family, tmp_path / "base", corpus)
    before = answers(tmp_path / "base")
    out = import_and_export(train, use_hf_folder, corpus, tmp_path / "base")
    moved = tmp_path / "moved"
    names = {path.name for path in moved.iterdir()} - {"model.safetensors", "README.md"}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names | {"model.safetensors"}
    for name in names:
        assert (out / name).read_bytes() == (moved / name).read_bytes(), name
    stored, exported = load_file(moved / "model.safetensors"), load_file(out / "model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in stored.items())
    after = answers(out)
    for what, value in before.items():
        assert after[what] == value, what


def test_dtypes_and_names_of_the_source_are_kept(train, use_hf_folder, corpus, tmp_path):
    """The source has bf16 weights with float32 norms, names without prefix, and a tied head stored twice.

    An export in another dtype changes one key of the config.
    """
    folder = tmp_path / "base"
    write_source("gpt2", folder, corpus, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if "ln_" in name}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    out = import_and_export(train, use_hf_folder, corpus, folder)
    exported = load_file(out / "model.safetensors")
    assert {n: t.dtype for n, t in exported.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(tensor, exported[name]) for name, tensor in tensors.items())
    (checkpoint,) = Path("runs").glob("*/checkpoints/step-*")
    export_checkpoint(checkpoint, tmp_path / "wide", "float32", 10**9)
    assert {t.dtype for t in load_file(tmp_path / "wide" / "model.safetensors").values()} == {torch.float32}
    config, wide = (json.loads((path / "config.json").read_text()) for path in (out, tmp_path / "wide"))
    assert wide == {**config, "dtype": "float32"}


def test_a_run_with_another_tokenizer_exports_that_tokenizer(train, use_hf_folder, corpus, tmp_path):
    """The exported folder has the byte tokenizer and its special token ids."""
    write_source("mistral", tmp_path / "base", corpus)
    out = import_and_export(train, use_hf_folder, corpus, tmp_path / "base", "data.tokenizer=byte")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.model_type, config.sliding_window) == ("mistral", 64)
    assert tokenizer("abc")["input_ids"] == [97, 98, 99]
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token_id == config.eos_token_id == config.bos_token_id == 256
    assert (out / "LICENSE").is_file()


def test_a_resumed_run_exports_the_files_of_the_source(train, use_hf_folder, corpus, tmp_path):
    """The source folder is deleted before the resume; the checkpoint holds its small files."""
    write_source("mistral", tmp_path / "base", corpus)
    use_hf_folder(tmp_path / "base")
    data = f"data.path={corpus}"
    first = train(*UNCHANGED, data, f"data.tokenizer={tmp_path / 'base'}/tokenizer.json")
    shutil.copy(tmp_path / "base" / "tokenizer.json", tmp_path / "tokenizer.json")
    config = (tmp_path / "base" / "config.json").read_bytes()
    for path in (tmp_path / "base").iterdir():
        if path.name != "config.json":
            path.unlink()
    prepared = next(Path(".meshwright/data").iterdir())
    resumed = train(*UNCHANGED, "train.steps=2", f"data.path={prepared}", resume=True)
    assert resumed.run_dir == first.run_dir
    export_checkpoint(Path(resumed.result["checkpoint"]), tmp_path / "out", None, 10**9)
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT


@pytest.mark.parametrize("template", ["chatml", "mine.jinja"])
def test_a_template_of_the_data_is_exported(train, tmp_path, template):
    """The run has no Hugging Face folder. ``apply_chat_template`` gives the text and tokens of training."""
    (tmp_path / "mine.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<start>"}))
    lines = [json.dumps({"prompt": f"question {n}?", "answer": f"answer {n}"}) for n in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    run = train(*UNCHANGED, "data.path=qa.jsonl", f"data.template={template}", "data.tokenizer=bpe:320")
    checkpoint = Path(run.result["checkpoint"])
    export_checkpoint(checkpoint, tmp_path / "out", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    written = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    expected = {
        "chatml": "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n",
        "mine.jinja": "<start>[user]the quick brown fox;[assistant]",
    }
    assert written == expected[template]
    chat = load_template(str(tmp_path / "out" / "chat_template.jinja"), tmp_path, "byte")
    trained = load_template(template, tmp_path, "byte")
    conversation = Conversation("here", tuple(Message(m["role"], m["content"]) for m in MESSAGES))
    texts = ["".join(span.text for span in one.render(conversation, ())) for one in (chat, trained)]
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == texts[0] == texts[1]
    ids = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True)["input_ids"]
    assert tuple(ids) == encode_prompt(load_tokenizer(checkpoint), MESSAGES[0]["content"], trained).tokens


def test_the_exported_template_renders_an_alpaca_input_as_in_training(train, tmp_path):
    records = [{"instruction": f"Repeat {n}.", "input": f"word {n}", "output": f"{n}"} for n in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(records))
    run = train(*UNCHANGED, "data.path=alpaca.json", "data.template=alpaca", "data.tokenizer=byte")
    export_checkpoint(Path(run.result["checkpoint"]), tmp_path / "out", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    user = {"role": "user", "content": "Repeat 7.", "input": "word 7"}
    written = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "7"}], tokenize=False)
    trained = load_template("alpaca", tmp_path, "byte").render(read_conversation(records[7], "here"), ())
    assert written == "".join(span.text for span in trained)
    assert "### Input:\nword 7" in written


def test_a_template_of_the_data_replaces_that_of_the_source(train, use_hf_folder, corpus, tmp_path):
    """The tokenizer's other files stay, and transformers reads the new template."""
    write_source("mistral", tmp_path / "base", corpus)
    lines = [json.dumps({"prompt": f"question {n}?", "answer": f"answer {n}"}) for n in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    use_hf_folder(tmp_path / "base")
    data = ("data.path=qa.jsonl", "data.template=plain", f"data.tokenizer={tmp_path / 'base'}")
    run = train(*UNCHANGED, *data)
    export_checkpoint(Path(run.result["checkpoint"]), tmp_path / "out", None, 10**9)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "the quick brown fox\nline 3"
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    assert tokenizer.special_tokens_map == before.special_tokens_map
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "base" / "tokenizer.json"
    ).read_bytes()
