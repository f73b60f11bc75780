"""The plans of SuperScaler's paper on its settings, simulated: the best of all against the best of rule-based systems.

The devices are V100s as NVIDIA's data sheet has them: 125 TFLOPS in half precision, 900 GB/s of memory, 32 GB, and
NVLink with 150 GB/s in each direction up to 8 of them; beyond that InfiniBand with 12.5 GB/s: peak rates throughout.
Models are captured in single precision and stand for half precision: every byte counts half. Widths, heads, images,
windows, sequences and vocabularies are the paper's, one sample of Swin for each device and 32 of T5; of the 24 to 56
equal layers 4 are taken, since time grows with their number in every plan alike; the memory of the others' parameters
is added. With --quick 2 layers, at most 2 micro-batches and few rules are taken, of the smallest setting of each model.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench import harness
from rota.cluster.kinds import KINDS, PEAK, costs_of
from rota.errors import RotaError
from rota.graph.capture import capture
from rota.graph.graph import Graph
from rota.plan.costs import Costs
from rota.runtime.hollow import hollow_out
from rota.strategies.base import find
from rota.testing.models import Evoformer

LAYERS, MICROBATCHES = 4, 32
QUICK_LAYERS, QUICK_MICROBATCHES = 2, 2
"""The time to compile grows with both."""
MEMORY_BYTES = 2 * 32 * 2**30
"""In bytes of single precision, see above."""
_ADAM = 2
_INFINIBAND = 12.5e9


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on so many devices."""

    name: str
    devices: int
    layers: int
    """Of the paper's model."""
    taken: int
    """Layers that are simulated."""
    rules: tuple[str, ...]
    """What rule-based systems can say."""
    make: Callable[[], Graph]
    special: tuple[str, ...]
    """What only plans can say, for this model."""


def simulated(quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """For each setting the best plan against the best of data, ZeRO, Megatron and 1F1B and their products.

    First the ratio, or what fits where no rule-based plan does; then all that is known of it.
    """
    settings = list(_settings(quick))
    wanted = _smallest(settings) if quick else settings
    found = {one.name: _compare(one) for one in wanted}
    ratios = {name: one["ratio"] or f"{one['fits']} fit" for name, one in found.items()}
    return {one.name: ratios.get(one.name, harness.LEFT_OUT) for one in settings}, found


def _smallest(settings: Sequence[Setting]) -> list[Setting]:
    """The first one of each model."""
    return list({one.name.partition("_")[0]: one for one in reversed(settings)}.values())


def _settings(quick: bool) -> Iterator[Setting]:
    taken, most, cuts = (QUICK_LAYERS, QUICK_MICROBATCHES, (4,)) if quick else (LAYERS, MICROBATCHES, (4, 16))
    swin = ((32, 512, 16, 4), (40, 768, 24, 8), (48, 1024, 32, 16), (56, 1536, 32, 32))
    t5 = ((24, 2048, 32, 4, 512), (32, 3072, 48, 8, 1024), (32, 4096, 64, 16, 1536), (32, 6144, 96, 32, 2048))
    for layers, width, heads, devices in swin:
        yield Setting(
            name=f"swin_{layers}x{width}_on_{devices}",
            devices=devices,
            layers=layers,
            taken=taken,
            rules=tuple(_quick_rules(devices) if quick else _rules(devices)),
            make=functools.partial(_swin, width, heads, devices, taken),
            special=tuple(f"{way}({devices}) * coshard({parts})" for way in ("data", "zero") for parts in cuts),
        )
    for layers, width, heads, devices, thousands in t5:
        yield Setting(
            name=f"t5_{layers}x{width}_{thousands}k_on_{devices}",
            devices=devices,
            layers=layers,
            taken=taken,
            rules=tuple(_quick_rules(devices) if quick else _rules(devices)),
            make=functools.partial(_t5, width, heads, thousands * 1024, taken),
            special=(f"interlaced(microbatches={most})", f"tensor(vocabulary=True, microbatches={most})"),
        )
    for devices in (2, 4):
        yield Setting(
            name=f"evoformer_on_{devices}",
            devices=devices,
            layers=48,
            taken=taken,
            rules=tuple(_quick_rules(devices) if quick else _rules(devices)),
            make=functools.partial(_evoformer, taken),
            special=("dap", f"recycled(microbatches={min(2 * devices, most)})"),
        )


def _compare(setting: Setting) -> dict[str, Any]:
    begun_s = time.perf_counter()
    graph = setting.make()
    found: dict[str, float] = {}
    refused: dict[str, str] = {}
    for text in dict.fromkeys((*setting.rules, *setting.special)):
        try:
            program = find(text)(graph, setting.devices).compile()
            simulation = program.simulate(_v100(setting.devices))
        except RotaError as error:
            refused[text] = str(error)[:120]
            continue
        scale = setting.layers / setting.taken
        need_bytes = max(
            peak + (_ADAM + 1) * stored * (scale - 1) + _ADAM * stored
            for peak, stored in zip(simulation.peak_bytes, simulation.stored_bytes, strict=True)
        )
        if need_bytes > MEMORY_BYTES:
            refused[text] = f"needs {need_bytes / 2**30:.0f} GiB"
            continue
        found[text] = simulation.makespan_s
    rules = {text: s for text, s in found.items() if text not in setting.special}
    best = min(found, key=found.__getitem__) if found else ""
    best_rule = min(rules, key=rules.__getitem__) if rules else ""
    return {
        "best": best,
        "best_rule": best_rule,
        "ratio": rules[best_rule] / found[best] if rules else None,
        "fits": "both" if rules else "only plans" if found else "none",
        "seconds": {text: round(s, 4) for text, s in sorted(found.items(), key=lambda one: one[1])},
        "refused": refused,
        "took_s": round(time.perf_counter() - begun_s, 1),
    }


def _rules(devices: int) -> Iterator[str]:
    yield from ("data", "zero(stage=1)", "zero(stage=3)", "tensor", f"tensor(microbatches={MICROBATCHES})")
    for ways in (devices, 4 * devices, MICROBATCHES):
        yield f"pipeline(microbatches={ways})"
    # coshard(1) is recomputing, which rule-based systems know.
    yield from (f"data({devices}) * coshard(1)", f"zero({devices}) * coshard(1)", f"tensor({devices}) * coshard(1)")
    yield f"zero({devices}, microbatches={max(1, MICROBATCHES // devices)})"
    for inner in (2, 4, 8):
        if inner < devices:
            yield from (f"data({devices // inner}) * tensor({inner})", f"zero({devices // inner}) * tensor({inner})")
            yield f"zero({devices // inner}) * tensor({inner}) * coshard(1)"
            yield f"data({devices // inner}) * pipeline({inner}, microbatches={2 * inner})"
            yield f"tensor({devices // inner}) * pipeline({inner}, microbatches={2 * inner})"


def _quick_rules(devices: int) -> Iterator[str]:
    yield from ("data", "zero(stage=3)", f"tensor(microbatches={QUICK_MICROBATCHES})")
    yield from (f"pipeline(microbatches={QUICK_MICROBATCHES})", f"zero({devices}) * coshard(1)")


def _v100(devices: int) -> Costs:
    link = None if devices <= 8 else _INFINIBAND
    return costs_of(KINDS["V100-32GB"], arithmetic="half", reach=PEAK, link_bytes_per_s=link, byte_share=0.5)


# ---- the models: shapes only ----


def _hollow(make: Callable[[], Any], batch: Any, loss: Any) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = make()
        hollow_out(model)
        return capture(model.train(), batch, loss)


def _swin(width: int, heads: int, devices: int, layers: int) -> Graph:
    import transformers

    made: Any = transformers
    config = made.SwinConfig(
        image_size=1536,
        patch_size=4,
        embed_dim=width,
        depths=[layers],
        num_heads=[heads],
        window_size=48,
        num_labels=1000,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    batch = {"pixel_values": torch.zeros(devices, 3, 1536, 1536), "labels": torch.zeros(devices, dtype=torch.long)}
    return _hollow(lambda: made.SwinForImageClassification(config), batch, lambda model, one: model(**one).loss)


def _t5(width: int, heads: int, vocabulary: int, layers: int) -> Graph:
    import transformers

    made: Any = transformers
    config = made.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers // 2,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    tokens = torch.zeros(32, 1024, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return _hollow(lambda: made.T5ForConditionalGeneration(config), batch, lambda model, one: model(**one).loss)


def _evoformer(layers: int) -> Graph:
    samples, sequences, residues, width = 8, 128, 256, 256
    batch = (
        torch.zeros(samples, sequences, residues, width),
        torch.zeros(samples, residues, residues, width),
        torch.zeros(samples, sequences, residues, dtype=torch.long),
    )

    def loss(model: Any, one: Any) -> torch.Tensor:
        return F.cross_entropy(model(one[0], one[1]).flatten(0, 2), one[2].flatten())

    return _hollow(lambda: Evoformer(width=width, depth=layers, heads=8, recycles=3), batch, loss)
