"""Architectures of the zoo for images, sound, video, image and text, time series and decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.zoo import batches as b

IMAGE_ID = 3
_VISION = {"image_size": 16, "num_channels": 3}
_BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
_SOUND = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_conv_pos_embeddings": 8,
          "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}  # fmt: skip
_LLAMA = {"model_type": "llama"}


def per_query(output: Any, target: Any) -> torch.Tensor:
    """Return the loss of a detector in which every query has a class and a box to find."""
    logits, place = output["logits"], output["pred_boxes"]
    return F.cross_entropy(logits.flatten(0, 1), target["classes"].flatten()) + F.l1_loss(place, target["boxes"])


def depth_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error of a depth estimate."""
    return F.l1_loss(output["predicted_depth"], target)


def mask_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicted masks."""
    return F.binary_cross_entropy_with_logits(output["pred_masks"], target)


def action_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of predicted actions."""
    return F.mse_loss(output["action_preds"], target)


def queries(size: int, count: int) -> b.Make:
    """Return a function that makes images and what each query should find."""
    return lambda rows: (
        {"pixel_values": b.pixels(size, rows)},
        {"classes": b.numbers(rows, count), "boxes": b.floats(rows, count, 4, seed=9).sigmoid()},
    )


def depths(size: int) -> b.Make:
    """Return a function that makes images and the depth of each pixel."""
    return lambda rows: ({"pixel_values": b.pixels(size, rows)}, b.floats(rows, size, size, seed=9).abs() + 0.5)


def pointed(rows: int) -> Any:
    """Return images with two points each, and three masks."""
    inputs = {"pixel_values": b.pixels(32, rows), "input_points": b.floats(rows, 1, 2, 2).abs() * 8,
              "input_labels": b.numbers(rows, 1, 2, high=2)}  # fmt: skip
    return inputs, b.numbers(rows, 1, 3, 16, 16, high=2).float()


def episodes(rows: int) -> Any:
    """Return states, actions and rewards of six steps, and the right actions."""
    steps = torch.arange(6).repeat(rows, 1)
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[::2, 0] = 0
    inputs = {"states": b.floats(rows, 6, 7), "actions": b.floats(rows, 6, 3), "rewards": b.floats(rows, 6, 1),
              "returns_to_go": b.floats(rows, 6, 1, seed=8), "timesteps": steps, "attention_mask": mask}  # fmt: skip
    return inputs, b.floats(rows, 6, 3, seed=9)


def patches(rows: int) -> b.Batch:
    """Return texts with an image of four by four patches each, as the processor of Qwen2-VL does."""
    grid = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
    batch = b.mixed(16, 4, IMAGE_ID)(rows)
    kinds = (batch["input_ids"] == IMAGE_ID).int()
    flat = b.floats(rows * 16, 3 * 2 * 4 * 4)
    return {**batch, "pixel_values": flat, "image_grid_thw": grid, "mm_token_type_ids": kinds}


_TEXT_AND_IMAGE = {"text_config": {}, "vision_config": _VISION}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_SERIES = {"prediction_length": 6, "context_length": 12, "num_time_features": 1, "lags_sequence": [1, 2]}
_IMAGES: list[tuple[str, str, str, b.Make, dict[str, Any]]] = [
    ("beit", "image classification", "BeitForImageClassification", b.images(16), _VISION),
    ("cvt", "image classification", "CvtForImageClassification", b.images(32), {
        "embed_dim": [8, 8, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0],
    }),
    ("deit", "image classification", "DeiTForImageClassification", b.images(16), _VISION),
    ("efficientnet", "image classification", "EfficientNetForImageClassification", b.images(32), {
        "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "in_channels": [32,
        16, 24],
        "out_channels": [16, 24, 40], "kernel_sizes": [3, 3, 5], "strides": [1, 2, 2], "num_block_repeats": [1, 1, 1],
        "expand_ratios": [1, 6, 6],
    }),
    ("levit", "image classification", "LevitForImageClassification", b.images(64), {
        "image_size": 64, "patch_size": 16, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    }),
    ("mobilenet_v2", "image classification", "MobileNetV2ForImageClassification", b.images(32), {
        "image_size": 32, "depth_multiplier": 0.25,
    }),
    ("mobilevit", "image classification", "MobileViTForImageClassification", b.images(64), {
        "image_size": 64, "patch_size": 2, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
    }),
    ("poolformer", "image classification", "PoolFormerForImageClassification", b.images(32), {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    }),
    ("regnet", "image classification", "RegNetForImageClassification", b.images(32), {
        "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 4,
    }),
    ("swin", "image classification", "SwinForImageClassification", b.images(32), _SWIN),
    ("swinv2", "masked images", "Swinv2ForMaskedImageModeling", b.hidden_patches(32, 64), {**_SWIN,
        "encoder_stride": 8}),
    ("vit_mae", "masked images", "ViTMAEForPreTraining", lambda rows: {"pixel_values": b.pixels(16, rows)}, {
        **_VISION, "patch_size": 4, "decoder_num_attention_heads": 2, "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 24,
    }),
    ("dpt", "segmentation", "DPTForSemanticSegmentation", b.segments(32), {
        "image_size": 32, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8,
        16, 16],
        "fusion_hidden_size": 16,
    }),
    ("segformer", "segmentation", "SegformerForSemanticSegmentation", b.segments(32), {
        "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
    }),
    ("upernet", "segmentation", "UperNetForSemanticSegmentation", b.segments(32), {
        "backbone_config": {**_BACKBONE, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "auxiliary_in_channels": 16, "auxiliary_channels": 8,
    }),
    ("timesformer", "video", "TimesformerForVideoClassification", b.videos(16, 4), {**_VISION, "num_frames": 4}),
    ("videomae", "video", "VideoMAEForVideoClassification", b.videos(16, 4), {**_VISION, "num_frames": 4}),
]  # fmt: skip
_SOUNDS: list[tuple[str, str, str, b.Make, dict[str, Any]]] = [
    ("audio-spectrogram-transformer", "sound", "ASTForAudioClassification",
        lambda rows: {"input_values": b.floats(rows, 48, 32), "labels": b.numbers(rows)},
        {"max_length": 48, "num_mel_bins": 32}),
    ("wavlm", "sound", "WavLMForSequenceClassification", b.waves(800), _SOUND),
    ("whisper", "sound", "WhisperForAudioClassification",
        lambda rows: {"input_features": b.floats(rows, 16, 40), "labels": b.numbers(rows)},
        {"num_mel_bins": 16, "max_source_positions": 20, "classifier_proj_size": 16}),
    ("hubert", "CTC", "HubertForCTC", b.spelled(800), _SOUND),
    ("sew", "CTC", "SEWForCTC", b.spelled(800), _SOUND),
    ("wav2vec2", "CTC", "Wav2Vec2ForCTC", b.spelled(800), _SOUND),
    ("moonshine", "speech to text", "MoonshineForConditionalGeneration", b.spoken("input_values", 2000), {
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    }),
    ("speech_to_text", "speech to text", "Speech2TextForConditionalGeneration", b.spoken("input_features", 40, 16), {
        "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64, "max_target_positions": 64,
    }),
]  # fmt: skip
_PAIRS: list[tuple[str, str, str, b.Make, dict[str, Any]]] = [
    ("blip", "image and text", "BlipForConditionalGeneration", b.captions(16), {
        **_TEXT_AND_IMAGE, "text_config": {"encoder_hidden_size": 32},
    }),
    ("clip", "image and text", "CLIPModel", b.contrasted(16), _TEXT_AND_IMAGE),
    ("git", "image and text", "GitForCausalLM", b.captions(16), {"vision_config": _VISION}),
    ("llava", "image and text", "LlavaForConditionalGeneration", b.mixed(16, 4, IMAGE_ID), {
        "text_config": _LLAMA, "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": IMAGE_ID, "image_seq_length": 4,
    }),
    ("paligemma", "image and text", "PaliGemmaForConditionalGeneration", b.mixed(16, 4, IMAGE_ID,
        token_type_ids=lambda rows: (torch.arange(4 + b.SEQ) >= 8).long().repeat(rows, 1)), {
        "text_config": {"model_type": "gemma"}, "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": IMAGE_ID,
    }),
    ("qwen2_vl", "image and text", "Qwen2VLForConditionalGeneration", patches, {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 2, "embed_dim": 32, "patch_size": 4}, "image_token_id": IMAGE_ID,
        "vision_start_token_id": 90, "vision_end_token_id": 91, "video_token_id": 92,
    }),
    ("siglip", "image and text", "SiglipModel", b.contrasted(16), _TEXT_AND_IMAGE),
    ("vilt", "image and text", "ViltForQuestionAnswering",
        lambda rows: {**b.described(16)(rows), "labels": b.floats(rows, b.CLASSES).sigmoid()}, _VISION),
    ("vision-encoder-decoder", "image and text", "VisionEncoderDecoderModel",
        lambda rows: {"pixel_values": b.pixels(16, rows), "labels": b.language(rows)["labels"]}, {
        "encoder": {"model_type": "vit", **_VISION},
        "decoder": {"model_type": "gpt2", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 1, "pad_token_id": 0,
    }),
]  # fmt: skip
_NUMBERS: list[tuple[str, str, str, b.Make, dict[str, Any]]] = [
    ("autoformer", "time series", "AutoformerForPrediction", b.series(14, 6), {
        **_SERIES, "moving_average": 3, "label_length": 4,
    }),
    ("informer", "time series", "InformerForPrediction", b.series(14, 6), _SERIES),
    ("patchtsmixer", "time series", "PatchTSMixerForTimeSeriesClassification",
        b.channels(32, 2, lambda rows: b.numbers(rows, high=3), "target_values"), {"num_input_channels": 2}),
    ("patchtst", "time series", "PatchTSTForRegression",
        b.channels(32, 2, lambda rows: b.floats(rows, 1), "target_values"),
        {"num_input_channels": 2, "patch_length": 8, "patch_stride": 8}),
    ("time_series_transformer", "time series", "TimeSeriesTransformerForPrediction", b.series(14, 6), _SERIES),
]  # fmt: skip
_WITH_LOSS: list[tuple[str, str, str, b.Make, dict[str, Any], Callable[[Any, Any], torch.Tensor]]] = [
    ("detr", "detection", "DetrForObjectDetection", queries(32, 5), {
        "backbone_config": {**_BACKBONE, "out_features": ["stage4"]}, "num_queries": 5,
    }, per_query),
    ("yolos", "detection", "YolosForObjectDetection", queries(16, 5), {
        "image_size": [16, 16], "num_detection_tokens": 5,
    }, per_query),
    ("depth_anything", "depth", "DepthAnythingForDepthEstimation", depths(32), {
        "backbone_config": {"model_type": "dinov2", "image_size": 32, "num_hidden_layers": 4,
                            "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False},
        "reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16,
        "head_hidden_size": 8,
    }, depth_error),
    ("glpn", "depth", "GLPNForDepthEstimation", depths(32), {
        "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
    }, depth_error),
    ("sam", "segmentation", "SamModel", pointed, {
        "vision_config": {"image_size": 32, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1],
                          "num_pos_feats": 16},
        "prompt_encoder_config": {"image_size": 32, "mask_input_channels": 4},
        "mask_decoder_config": {"mlp_dim": 48, "iou_head_hidden_dim": 16},
    }, mask_error),
    ("decision_transformer", "decisions", "DecisionTransformerModel", episodes, {
        "state_dim": 7, "act_dim": 3, "max_ep_len": 16, "vocab_size": 1,
    }, action_error),
]  # fmt: skip

MEDIA_MODELS = [*_IMAGES, *_SOUNDS, *_PAIRS, *_NUMBERS, *_WITH_LOSS]
"""(name, kind, class of the model, batch, sizes) and a loss if the model has none."""
