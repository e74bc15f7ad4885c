"""Real models that ask about the numbers of their batch: the step is that of the plain model, whole and in parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from support.oracles.one_process import gradient_error, gradients_of
from torch import nn

import autopart

os.environ.setdefault("HF_HUB_OFFLINE", "1")


hf.logging.set_verbosity_error()

IMAGE, WORDS = 95, 90
_TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip
_RESAMPLER = {
    "hidden_size": 32, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 4,
    "resampler_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    make: builds the model; batch: returns the batch for a number of rows and a seed; micros: numbers of micro-batches
    it can run in.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensors]
    micros: tuple[int, ...] = (1, 2)

    def model(self) -> nn.Module:
        """Return the model with the same weights at every call, in training mode."""
        torch.manual_seed(0)
        return self.make().train()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _speech_batch(rows: int, seed: int) -> Tensors:
    labels = torch.randint(1, 20, (rows, 6), generator=_seeded(seed))
    present = torch.ones(rows, 400, dtype=torch.long)
    for row in range(rows):
        labels[row, 3 + (row + seed) % 4 :] = -100
        present[row, 300 + 25 * ((row + seed) % 4) :] = 0
    sound = torch.randn(rows, 400, generator=_seeded(seed))
    return {"input_values": sound, "attention_mask": present, "labels": labels}


def _image_text(places: int, *, images_axis: bool) -> Callable[[int, int], Tensors]:
    """Return a function that makes text batches with `places` image tokens in each row at varying positions."""

    def batch(rows: int, seed: int) -> Tensors:
        ids = torch.randint(5, WORDS, (rows, 12 + places), generator=_seeded(seed))
        for row in range(rows):
            start = (row + seed) % 3
            ids[row, start : start + places] = IMAGE
        images = torch.randn(rows, 3, 16, 16, generator=_seeded(seed))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images}
        if images_axis:
            given["pixel_values"] = images[:, None]
            given["pixel_attention_mask"] = torch.ones(rows, 1, 16, 16, dtype=torch.long)
        return {**given, "labels": ids.where(ids != IMAGE, -100)}

    return batch


def _paligemma_batch(rows: int, seed: int) -> Tensors:
    words = torch.randint(5, WORDS, (rows, 12), generator=_seeded(seed))
    ids = torch.cat([torch.full((rows, 4), IMAGE), words], 1)
    labels = ids.clone()
    labels[:, :6] = -100
    kinds = (torch.arange(16)[None, :] >= 6).long().repeat(rows, 1)
    images = torch.randn(rows, 3, 16, 16, generator=_seeded(seed))
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "labels": labels, "token_type_ids": kinds}


def _qwen() -> Any:
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    text = {**_TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = hf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=94, vision_start_token_id=93,
        vision_end_token_id=92,
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config)


def _qwen_batch(rows: int, seed: int) -> Tensors:
    ids = torch.randint(5, WORDS, (rows, 16), generator=_seeded(seed))
    for row in range(rows):
        start = 1 + (row + seed) % 3
        ids[row, start - 1] = 93
        ids[row, start : start + 4] = IMAGE
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    images = torch.randn(rows * 16, 96, generator=_seeded(seed))
    places, _ = _qwen().model.get_rope_index(**given)
    return {**given, "pixel_values": images, "position_ids": places, "labels": ids.where(ids != IMAGE, -100)}


def _llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_VISION), text_config=hf.LlamaConfig(**_TEXT), image_token_index=IMAGE
    )
    return hf.LlavaForConditionalGeneration(config)


def _paligemma() -> nn.Module:
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**_VISION, projection_dim=32),
        text_config=hf.GemmaConfig(**_TEXT, head_dim=8), image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config)


def _idefics2() -> nn.Module:
    config = hf.Idefics2Config(
        vision_config=_VISION, perceiver_config=_RESAMPLER, text_config=hf.MistralConfig(**_TEXT), image_token_id=IMAGE
    )
    return hf.Idefics2ForConditionalGeneration(config)


def _idefics3() -> nn.Module:
    config = hf.Idefics3Config(
        vision_config=_VISION, text_config=hf.LlamaConfig(**_TEXT), image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )
    return hf.Idefics3ForConditionalGeneration(config)


def _wav2vec2(reduction: str) -> Callable[[], nn.Module]:
    return lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_SPEECH, ctc_loss_reduction=reduction))


CASES = {
    "wav2vec2": Case(_wav2vec2("sum"), _speech_batch),
    "wav2vec2-mean": Case(_wav2vec2("mean"), _speech_batch),
    "hubert": Case(lambda: hf.HubertForCTC(hf.HubertConfig(**_SPEECH)), _speech_batch),
    "llava": Case(_llava, _image_text(4, images_axis=False)),
    "paligemma": Case(_paligemma, _paligemma_batch),
    "idefics2": Case(_idefics2, _image_text(3, images_axis=True)),
    "idefics3": Case(_idefics3, _image_text(1, images_axis=True)),
    "qwen2-vl": Case(_qwen, _qwen_batch, (1,)),
}


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_two_different_batches_are_exact_whole_and_in_micro_batches(case: Case):
    for micros in case.micros:
        model, plain = case.model(), case.model()
        sample = case.batch(4, 0)
        with autopart.compile(model, "cpu:1", sample=sample, micro_batches=micros, costs="analytic") as pipe:
            for seed in (0, 1):
                model.zero_grad()
                plain.zero_grad()
                batch = case.batch(4, seed)
                loss = plain(**batch).loss
                loss.backward()
                assert pipe.step(batch).item() == pytest.approx(loss.item(), rel=1e-5)
                error, worst = gradient_error(pipe.gradients(), gradients_of(plain))
                assert error <= 1e-5, worst
