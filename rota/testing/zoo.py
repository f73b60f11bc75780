"""Small instances of the model families that rota must be able to cut, each with a batch and a loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from rota.testing.models import GPT, Evoformer, MixtureOfExperts, ResNet


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A model with what is needed to train it for a step."""

    name: str = ""
    model: torch.nn.Module
    batch: Any
    loss: Callable[[torch.nn.Module, Any], Any]

    def in_doubles(self) -> Specimen:
        """The same in double precision, where equal computations come out equal but for the last digits."""

        def double(value: Any) -> Any:
            return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return replace(self, model=self.model.double(), batch=pytree.tree_map(double, self.batch))


def names() -> list[str]:
    """Every family; those from transformers are there if it is installed."""
    return sorted({**_OWN, **_TRANSFORMERS})


def make(name: str, *, batch: int = 4) -> Specimen:
    """A new model of a family, in train mode, from a fixed seed."""
    torch.manual_seed(0)
    return replace({**_OWN, **_TRANSFORMERS}[name](batch), name=name)


def _gpt(batch: int) -> Specimen:
    rows = torch.randint(0, 64, (batch, 13))

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Specimen(model=GPT(vocabulary=64, context=16, width=16, heads=2, dropout=0.1), batch=rows, loss=loss)


def _resnet(batch: int) -> Specimen:
    data = {"image": torch.rand(batch, 1, 8, 8), "label": torch.randint(0, 10, (batch,))}
    return Specimen(
        model=ResNet(width=8), batch=data, loss=lambda model, one: F.cross_entropy(model(one["image"]), one["label"])
    )


def _mixture(batch: int) -> Specimen:
    data = (torch.randn(batch, 6, 16), torch.randint(0, 10, (batch, 6)))
    return Specimen(
        model=MixtureOfExperts(),
        batch=data,
        loss=lambda model, one: F.cross_entropy(model(one[0]).flatten(0, 1), one[1].flatten()),
    )


def _evoformer(batch: int) -> Specimen:
    data = (torch.randn(batch, 4, 6, 8), torch.randn(batch, 6, 6, 8), torch.randint(0, 5, (batch, 4, 6)))
    return Specimen(
        model=Evoformer(),
        batch=data,
        loss=lambda model, one: F.cross_entropy(model(one[0], one[1]).flatten(0, 2), one[2].flatten()),
    )


def _of_transformers(kind: str, config: str, *, data: Callable[[int], dict[str, Any]], **settings: Any) -> Any:
    def build(batch: int) -> Specimen:
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(transformers, config)(**settings)
            if hasattr(made, "use_cache"):
                made.use_cache = False  # training has no use for it, and it only adds ops
            model = getattr(transformers, kind)(made)
        return Specimen(model=model.train(), batch=data(batch), loss=lambda model, one: model(**one).loss)

    return build


def _tokens(batch: int) -> dict[str, Any]:
    tokens = torch.randint(3, 60, (batch, 12))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.rand(batch, 3, 16, 16), "labels": torch.randint(0, 5, (batch,))}


_OWN: dict[str, Callable[[int], Specimen]] = {
    "gpt": _gpt,
    "resnet": _resnet,
    "mixture": _mixture,
    "evoformer": _evoformer,
}

_TEXT: dict[str, Any] = {"vocab_size": 64, "data": _tokens}
_TRANSFORMERS: dict[str, Callable[[int], Specimen]] = {
    "gpt2": _of_transformers(
        *("GPT2LMHeadModel", "GPT2Config"),
        **_TEXT,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": _of_transformers(
        *("LlamaForCausalLM", "LlamaConfig"),
        **_TEXT,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    ),
    "bert": _of_transformers(
        *("BertForMaskedLM", "BertConfig"),
        **_TEXT,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    ),
    "t5": _of_transformers(
        *("T5ForConditionalGeneration", "T5Config"),
        **_TEXT,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "mbart": _of_transformers(
        *("MBartForConditionalGeneration", "MBartConfig"),
        **_TEXT,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    ),
    "vit": _of_transformers(
        *("ViTForImageClassification", "ViTConfig"),
        data=_images,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=5,
    ),
    "swin": _of_transformers(
        *("SwinForImageClassification", "SwinConfig"),
        data=_images,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=2,
        num_labels=5,
    ),
}
