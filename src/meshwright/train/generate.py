"""Generates text from a checkpoint, in one process or with tensor parallelism."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint.hf.weights import require_weights
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE, EventWriter, Listener, to_json
from meshwright.data.chat import Template
from meshwright.data.chat_templates import load_template
from meshwright.data.prompt import encode_prompt
from meshwright.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.launch.exits import EXIT_OK
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.decoder import Decoder
from meshwright.parallel.mesh import Mesh, destroy_mesh, init_mesh
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.train.saved_model import build_saved_job, is_image_model, load_saved_model
from meshwright.train.worker import describe_failure

TASK_FILE = "generate.json"
ENTRY = "meshwright.train.generate:run_rank"


@dataclass(frozen=True)
class GenerateTask:
    """Prompt, checkpoint and settings of a generation."""

    checkpoint: str
    """Folder of a checkpoint, or a Hugging Face folder with weights and tokenizer.json."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    tokens: int = 200
    """Maximum number of tokens."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int = 40
    """Sample from the k likeliest tokens; 0 for all."""
    seed: int = 0
    """The same seed gives the same text."""
    template: str | None = None
    """Chat template that wraps the prompt as a user message; None uses the prompt as it is."""
    tp: int = 1
    """Tensor-parallel degree."""

    def write(self, folder: Path) -> None:
        """Write it for the ranks."""
        (folder / TASK_FILE).write_text(to_json(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> GenerateTask:
        """Read it in a rank."""
        return cls(**json.loads((folder / TASK_FILE).read_text(encoding="utf-8")))

    def chat(self) -> Template | None:
        """The loaded chat template."""
        if self.template is None:
            return None
        tokenizer = str(Path(self.checkpoint).absolute() / TOKENIZER_FILE)
        return load_template(self.template, Path.cwd(), tokenizer, key="template")

    def check(self) -> Job:
        """Check the task before anything starts; returns its job.

        Raises:
            UserError: The template, the tokenizer or the weights are missing or do not fit the model.
        """
        job, folder = self.job(), Path(self.checkpoint)
        assert isinstance(job.model, DecoderModel), "a language model"
        self.chat()
        tokens, vocab_size = load_tokenizer(folder).vocab_size, job.model.vocab_size
        if tokens > vocab_size:
            rule = f"has {tokens} tokens, more than model.vocab_size={vocab_size}"
            where, fix = str(folder / TOKENIZER_FILE), "Use the tokenizer that the model was trained with"
            raise UserError(Problem("model-vocab-small", rule, path=where, fix=fix))
        if not (folder / MANIFEST).is_file():
            require_weights(job.model)
        return job

    def job(self) -> Job:
        """The model as a job with a legal layout.

        Raises:
            UserError: It is not a language model, or the tensor-parallel degree is illegal.
        """
        folder = Path(self.checkpoint)
        if is_image_model(folder):
            rule, fix = "is an image model and generates no text", "Give a checkpoint of a decoder"
            raise UserError(Problem("generate-not-text", rule, path=str(folder), fix=fix))
        return build_saved_job(folder, {"path": "builtin:python-stdlib", "tokenizer": "byte"}, tp=self.tp)


def load_model(task: GenerateTask, mesh: Mesh | None = None) -> Decoder:
    """The model of a checkpoint, or the shard of this rank; without a mesh for one process."""
    model = load_saved_model(Path(task.checkpoint), task.job(), mesh)
    assert isinstance(model, Decoder), "a language model"
    return model


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Generate as one tensor-parallel rank; rank 0 writes the events. Returns the exit status."""
    folder, rank = Path(run_dir), int(os.environ["RANK"])
    events = EventWriter(folder / EVENTS_FILE, rank, 0, listener)
    try:
        task = GenerateTask.read(folder)
        mesh = init_mesh(task.job(), CollectiveCounter())

        def on_token(count: int) -> None:
            if rank == 0:
                events.write("generated", tokens=count)

        text = generate_text(task, mesh, on_token)
        if rank == 0:
            events.write("text", text=text)
        destroy_mesh(mesh)
    except Exception as error:
        return describe_failure(error).write(events)
    finally:
        events.close()
    return EXIT_OK


@torch.no_grad()
def generate_text(
    task: GenerateTask, mesh: Mesh | None = None, on_token: Callable[[int], None] | None = None
) -> str:
    """Continue a prompt; ends early at the end of a document or of an answer.

    Args:
        task: What to generate.
        mesh: Mesh of the tensor-parallel ranks; None for one process.
        on_token: Called with the number of tokens so far.
    """
    model, tokenizer = load_model(task, mesh), load_tokenizer(Path(task.checkpoint))
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(task.seed)
    prompt = encode_prompt(tokenizer, task.prompt, task.chat())
    ids = list(prompt.tokens)
    generated: list[int] = []
    for count in range(task.tokens):
        window = torch.tensor([ids[-model.seq_len :]], device=device)
        logits = model(window)[0, -1].float().cpu()[: tokenizer.vocab_size]
        chosen = _sample_token(logits, task.temperature, task.top_k, generator)
        if chosen in prompt.ends:
            break
        ids.append(chosen)
        generated.append(chosen)
        if on_token is not None:
            on_token(count + 1)
    return tokenizer.decode(generated)


def _sample_token(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < 1e-4:  # dividing by less overflows float32
        return int(logits.argmax())
    if top_k:
        threshold = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
