"""Writes text with a checkpoint's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.core.errors import Problem, UserError
from meshwright.prepare.conversation import Template
from meshwright.prepare.question import encode_question
from meshwright.prepare.tokenizer import TOKENIZER_FILE, load_tokenizer
from meshwright.run.models.decoder import Decoder
from meshwright.run.models.hf import HfParameters
from meshwright.run.models.init import fill
from meshwright.spec.hf import read_config
from meshwright.spec.model import DecoderModel
from meshwright.survive.checkpoint.manifest import MANIFEST, MODEL_FILE, read_manifest
from meshwright.survive.checkpoint.plain import load_tensors
from meshwright.survive.hf.weights import require_weights

LONGEST_WINDOW = 4096
"""Tokens that a model of a Hugging Face folder looks back; many know more positions than fit in memory."""


def load_model(checkpoint: Path, device: torch.device) -> Decoder:
    """The model of a checkpoint, which is verified first, or of a Hugging Face folder."""
    if not (checkpoint / MANIFEST).is_file():
        return _load_hf(checkpoint, device)
    manifest = read_manifest(checkpoint)
    if manifest.model.get("architecture") == "resnet":
        rule, fix = "is a model of images: it writes no text", "Give a checkpoint of a decoder"
        raise UserError(Problem("generate-not-text", rule, path=str(checkpoint), fix=fix))
    model = Decoder(DecoderModel(**manifest.model), manifest.seq_len)
    tensors = load_tensors(checkpoint, MODEL_FILE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.to(device).eval()


def _load_hf(folder: Path, device: torch.device) -> Decoder:
    config = read_config(folder)
    shape = DecoderModel(**config.fields, hf=str(folder))
    known = (shape.max_positions, config.sliding_window, LONGEST_WINDOW)
    model = Decoder(shape, min(length for length in known if length is not None))
    weights = HfParameters(require_weights(shape), shape)
    fill(model, [name for name, _ in model.named_parameters()], weights, torch.device("cpu"))
    return model.to(device).eval()


@torch.no_grad()
def generate_text(
    checkpoint: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    template: Template | None = None,
    heard: Callable[[int], None] | None = None,
) -> str:
    """Go on from a prompt; ends early at the end of a document or of an answer.

    Args:
        checkpoint: Folder of a checkpoint, or a Hugging Face folder with weights and tokenizer.json.
        prompt: Text to go on from; empty starts a new document.
        tokens: Tokens to write at most.
        temperature: 0 takes the likeliest token every time.
        top_k: Choose among this many; 0 for all.
        seed: The same seed writes the same text.
        template: Makes the prompt a user's message; None takes it as it is.
        heard: Told how many tokens are written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(checkpoint, device), load_tokenizer(checkpoint)
    if tokenizer.vocab_size > model.embed.num_embeddings:
        rule = f"has {tokenizer.vocab_size} tokens, and the model's vocabulary {model.embed.num_embeddings}"
        where, fix = str(checkpoint / TOKENIZER_FILE), "Use the tokenizer that the model was trained with"
        raise UserError(Problem("model-vocab-small", rule, path=where, fix=fix))
    generator = torch.Generator().manual_seed(seed)
    question = encode_question(tokenizer, prompt, template)
    ids = list(question.tokens)
    written: list[int] = []
    for count in range(tokens):
        window = torch.tensor([ids[-model.seq_len :]], device=device)
        logits = model(window)[0, -1].float().cpu()[: tokenizer.vocab_size]
        chosen = _choose(logits, temperature, top_k, generator)
        if chosen in question.ends:
            break
        ids.append(chosen)
        written.append(chosen)
        if heard is not None:
            heard(count + 1)
    return tokenizer.decode(written)


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < 1e-4:  # dividing by less would leave the range of float32
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
