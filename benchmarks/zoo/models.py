"""The architectures of the zoo: transformers models with a few thousand weights.

Selection: well-known families from the tables of transformers by task (MODEL_FOR_..._MAPPING), no family twice, listed
here before any of them was run; none was removed or replaced afterwards. A configuration sets sizes, and switches off
random draws in every step (dropout, dropped layers, masks over sound), because different programs draw different
numbers. Everything else is the default: attention, experts, caches, losses. Models of transformers without a loss, or
with one that needs packages that are not installed (detection matches boxes with scipy), get a loss here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.shared.architectures import Sizes, built, seeded, sizes
from benchmarks.zoo import batches as b
from benchmarks.zoo.media_models import MEDIA_MODELS

SIZES: Sizes = {
    **sizes(hidden=32, inside=48, layers=2, heads=4, groups=2, head=8, experts=4, chosen=2, tokens=64),
    **sizes(vocab=b.VOCAB, classes=b.CLASSES),
    **{"rotary_dim": 4, "patch_size": 8, "sliding_window": 8, "state_size": 8, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 2},
    **{"eos_token_id": 3, "sep_token_id": 3},
}
"""Values of these names in any configuration that has them."""


@dataclass(frozen=True)
class Architecture:
    """An architecture. model: its class in transformers; batch: makes a batch; sizes: beyond `SIZES`; loss: if it has
    none.
    """

    name: str
    kind: str
    model: str
    batch: b.Make
    sizes: Sizes = field(default_factory=dict)
    loss: Callable[[Any, Any], torch.Tensor] | None = None

    def make(self) -> nn.Module:
        """Return the model with the same weights every time, in training mode."""
        return seeded(lambda: built(self.model, SIZES, self.sizes), seed=7)


def find(name: str) -> Architecture:
    """Return an architecture by name. Raises KeyError."""
    return next(a for a in ARCHITECTURES if a.name == name)


_C = "decoder"
_DECODERS = [
    ("bamba", "BambaForCausalLM", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 8}),
    ("bloom", "BloomForCausalLM", {}),
    ("codegen", "CodeGenForCausalLM", {}),
    ("cohere2", "Cohere2ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("ctrl", "CTRLLMHeadModel", {}),
    ("dbrx", "DbrxForCausalLM", {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 32}}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {
        "num_key_value_heads": 4, "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    }),
    ("falcon", "FalconForCausalLM", {}),
    ("gemma", "GemmaForCausalLM", {}),
    ("gemma3", "Gemma3ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("glm4", "Glm4ForCausalLM", {}),
    ("gpt_bigcode", "GPTBigCodeForCausalLM", {}),
    ("gpt_neo", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    ("gpt_oss", "GptOssForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("gptj", "GPTJForCausalLM", {}),
    ("granitemoe", "GraniteMoeForCausalLM", {}),
    ("jamba", "JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4}),
    ("mamba", "MambaForCausalLM", {}),
    ("mamba2", "Mamba2ForCausalLM", {"num_heads": 8, "n_groups": 2, "chunk_size": 8}),
    ("mpt", "MptForCausalLM", {}),
    ("olmo2", "Olmo2ForCausalLM", {}),
    ("olmoe", "OlmoeForCausalLM", {}),
    ("openai-gpt", "OpenAIGPTLMHeadModel", {}),
    ("phi3", "Phi3ForCausalLM", {"original_max_position_embeddings": 64}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", {}),
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "attention_window_size": 8}),
    ("rwkv", "RwkvForCausalLM", {}),
    ("stablelm", "StableLmForCausalLM", {}),
    ("xglm", "XGLMForCausalLM", {}),
    ("xlnet", "XLNetLMHeadModel", {}),
]  # fmt: skip
_ENCODERS = [
    ("albert", "masked LM", "AlbertForMaskedLM", b.masked_language, {}),
    ("convbert", "masked LM", "ConvBertForMaskedLM", b.masked_language, {}),
    ("deberta-v2", "masked LM", "DebertaV2ForMaskedLM", b.masked_language, {}),
    ("distilbert", "masked LM", "DistilBertForMaskedLM", b.masked_language, {"dim": 32, "hidden_dim": 48}),
    ("modernbert", "masked LM", "ModernBertForMaskedLM", b.masked_language, {}),
    ("perceiver", "masked LM", "PerceiverForMaskedLM", b.masked_language, {
        "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "qk_channels": 32, "v_channels": 32,
        "max_position_embeddings": b.SEQ,
    }),
    ("xlm", "masked LM", "XLMWithLMHeadModel", b.masked_language, {"emb_dim": 32}),
    ("bart", "classification", "BartForSequenceClassification", b.ended, {}),
    ("camembert", "classification", "CamembertForSequenceClassification", b.classes, {}),
    ("esm", "classification", "EsmForSequenceClassification", b.classes, {"mask_token_id": 1}),
    ("fnet", "classification", "FNetForSequenceClassification",
        lambda rows: {"input_ids": b.tokens(rows), "labels": b.numbers(rows)}, {}),
    ("longformer", "classification", "LongformerForSequenceClassification", b.classes, {"attention_window": 4}),
    ("electra", "tagging", "ElectraForTokenClassification", b.tags, {}),
    ("layoutlm", "tagging", "LayoutLMForTokenClassification", b.layout_tags, {"max_2d_position_embeddings": 1024}),
    ("roformer", "tagging", "RoFormerForTokenClassification", b.tags, {}),
    ("squeezebert", "tagging", "SqueezeBertForTokenClassification", b.tags, {}),
    ("big_bird", "question answering", "BigBirdForQuestionAnswering", b.spans, {"num_labels": 2, "block_size": 2,
        "num_random_blocks": 1}),
    ("deberta", "question answering", "DebertaForQuestionAnswering", b.spans, {"num_labels": 2}),
    ("funnel", "question answering", "FunnelForQuestionAnswering", b.spans, {"num_labels": 2, "block_sizes": [1, 1]}),
    ("xlm-roberta", "question answering", "XLMRobertaForQuestionAnswering", b.spans, {"num_labels": 2}),
    ("canine", "multiple choice", "CanineForMultipleChoice", b.choices, {"local_transformer_stride": 8}),
    ("mobilebert", "multiple choice", "MobileBertForMultipleChoice", b.choices,
        {"intra_bottleneck_size": 32, "num_feedforward_networks": 2}),
    ("mpnet", "multiple choice", "MPNetForMultipleChoice", b.choices, {}),
    ("ernie", "next sentence", "ErnieForNextSentencePrediction", b.sentences, {}),
    ("megatron-bert", "next sentence", "MegatronBertForNextSentencePrediction", b.sentences, {}),
    ("bert-pretraining", "pretraining", "BertForPreTraining",
        lambda rows: {**b.masked_language(rows), "next_sentence_label": b.numbers(rows, high=2)}, {}),
    ("lxmert", "pretraining", "LxmertForPreTraining",
        lambda rows: {
            **b.masked_language(rows), "visual_feats": b.floats(rows, 6, 32), "visual_pos": b.floats(rows, 6, 4,
                seed=8),
            "matched_label": b.numbers(rows, high=2), "ans": b.numbers(rows, high=9),
        },
        {"num_qa_labels": 9, "visual_feat_dim": 32, "l_layers": 1, "x_layers": 1, "r_layers": 1,
            "task_obj_predict": False}),
    ("visual_bert", "pretraining", "VisualBertForPreTraining",
        lambda rows: {
            **b.text(rows), "visual_embeds": b.floats(rows, 6, 24), "visual_attention_mask": torch.ones(rows, 6),
            "labels": torch.cat([b.masked_language(rows)["labels"], torch.full((rows, 6), -100)], 1),
            "sentence_image_labels": b.numbers(rows, high=2),
        },
        {"visual_embedding_dim": 24}),
]  # fmt: skip
_BOTH = [
    ("blenderbot", "BlenderbotForConditionalGeneration", {}),
    ("led", "LEDForConditionalGeneration", {
        "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }),
    ("longt5", "LongT5ForConditionalGeneration", {"decoder_start_token_id": 0, "local_radius": 3}),
    ("m2m_100", "M2M100ForConditionalGeneration", {}),
    ("marian", "MarianMTModel", {"decoder_vocab_size": b.VOCAB, "scale_embedding": True}),
    ("mbart", "MBartForConditionalGeneration", {}),
    ("pegasus", "PegasusForConditionalGeneration", {}),
    ("prophetnet", "ProphetNetForConditionalGeneration", {}),
    ("switch_transformers", "SwitchTransformersForConditionalGeneration", {
        "decoder_start_token_id": 0,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8,
    }),
]  # fmt: skip


def _texts() -> list[Architecture]:
    decoders = [Architecture(name, _C, model, b.language, sizes) for name, model, sizes in _DECODERS]
    encoders = [Architecture(name, f"encoder, {head}", m, batch, s) for name, head, m, batch, s in _ENCODERS]
    both = [Architecture(name, "encoder-decoder", model, b.translation, sizes) for name, model, sizes in _BOTH]
    return [*decoders, *encoders, *both]


def _all() -> list[Architecture]:
    rows = [Architecture(*row) for row in MEDIA_MODELS]
    return [*_texts(), *rows]


ARCHITECTURES = _all()
