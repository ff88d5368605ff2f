"""What is true of a type of model or not, and the types of which it is.

What transformers does with weights was found with version 5.23 by building each of its models on the meta device
(tools/architectures.py); tests/architectures checks those that can be built tiny.
"""

from __future__ import annotations

from enum import Enum, auto


class Trait(Enum):
    """A fact about a type of model."""

    TRANSPOSED = auto()  # linear weights are stored transposed, [in, out] (transformers' Conv1D)
    TRANSPOSED_EXPERTS = auto()  # stacks of experts are stored as [experts, in, out]
    # They are published as [experts, in, out], and saved by transformers 5 as [experts, out, in].
    EXPERTS_EITHER_WAY = auto()
    ZERO_CENTRED_NORMS = auto()  # norms multiply by 1 + weight
    ROTATES_NEIGHBOURS = auto()  # RoPE turns neighbouring channels, which no function of transformers' module shows
    ROTATES_WINDOWS_ONLY = auto()  # layers with full attention have no RoPE if others have a sliding window
    NO_WINDOWS_IN_VLLM = auto()  # layers with a sliding window attend to the whole context there
    MISLABELLED_DECODER = auto()  # its configuration has is_decoder = False, although it predicts the next token
    # In a compressed-tensors checkpoint, transformers takes weights of single experts where others have stacks.
    TAKES_SINGLE_EXPERTS = auto()
    VLLM_TAKES_SINGLE_EXPERTS = auto()  # the same of vLLM, and not of transformers
    EXAMINED = auto()  # it is known what transformers does with the layers
    # transformers cuts a stored weight into several, or joins several, without regard to packed codes; of those that it
    # joins it even loses the plain ones of a compressed-tensors checkpoint.
    RESHAPED = auto()
    # vLLM has code of its own to load it, so its exports are written although transformers does not load them: it is
    # RESHAPED, or only weights that stay plain are joined, which exports for torchao survive.
    VLLM_ALONE = auto()
    RENAMED = auto()  # layers have other names in memory than in the file, and torchao's metadata has those in memory
    RENAMED_TOWERS = auto()  # the same of layers of a tower that stay plain: `ignore` must name the whole tower
    # It computes with a weight otherwise than by F.linear, the only product of torchao's tensors.
    USED_DIRECTLY = auto()
    USED_EARLY = auto()  # code of the model that initializes linear weights needs them as they are loaded
    # The sizes, layers or biases of its text model follow from other settings than those of most.
    OTHER_SIZES = auto()
    WRAPS_TEXT = auto()  # beside its towers it has a text model that computes as the type in its text_config does
    STACKED_BY_MLX = auto()  # mlx-lm stacks its experts, and changes nothing else
    RUN_BY_MLX = auto()  # another target refuses it, and mlx makes a model of it that mlx-lm runs


# A row of the table may state its traits itself; where little else is known of a type, a word here is shorter.
TYPES_WITH: dict[Trait, str] = {
    Trait.TRANSPOSED: "clvp decision_transformer gpt2 imagegpt openai-gpt",
    Trait.ROTATES_NEIGHBOURS: "codegen cohere cohere2 deepseek_v2 gptj llama4_text",
    Trait.ROTATES_WINDOWS_ONLY: "afmoe cohere2 exaone4 exaone_moe",
    Trait.NO_WINDOWS_IN_VLLM: "qwen2_moe",
    Trait.MISLABELLED_DECODER: "gpt_neox gpt_neox_japanese",
    Trait.TAKES_SINGLE_EXPERTS: "llama4 llama4_text qwen3_5_moe qwen3_5_moe_text",
    **dict.fromkeys((Trait.EXPERTS_EITHER_WAY, Trait.VLLM_TAKES_SINGLE_EXPERTS), "qwen3_vl_moe qwen3_vl_moe_text"),
    Trait.RESHAPED: """
bailing_hybrid depth_pro dinov2 dinov2_with_registers gradium_phonon_tts gte hrm_text inkling_mm_model
jina_embeddings_v3 minimax_m3_vl molmo2 molmo2_text nemo_speechlm nomic_bert qianfan_ocr qwen4_exp qwen4_exp_text radio
sapiens2 tipsv2 tipsv2_vision_model unlimited_ocr
""",
    Trait.VLLM_ALONE: """
glm5_next glm5_next_text kimi_linear nomic_bert olmo_hybrid qwen4_exp qwen4_exp_text step3p7
""",
    Trait.RENAMED: """
altclip audio-spectrogram-transformer beit cohere_asr cosmos3_edge cosmos3_omni csm d_fine deit dinov3_vit
ernie4_5_vl_moe glm5_next glm5_next_text granite_speech granite_speech_plus grounding-dino hy_v4 ijepa inkling2
inkling2_text kyutai_speech_to_text lfm3 lfm3_vl lfm3_vl_vision lw_detr mask2former maskformer mimi mistral_large4
mistral_large4_text mm-grounding-dino nemotron_h_omni oneformer paddleocr_vl pi0 pixio pp_doclayout_v3 pp_doclayout_v4
rf_detr rt_detr rt_detr_v2 sam3_tracker sam3_tracker_video sam3_video segformer swin t5gemma2 timesfm2_5
tipsv2_text_model ultrabert ultravbert vibevoice_asr video_llava vision-encoder-decoder vit vit_mae vit_msn vivit
""",
    Trait.RENAMED_TOWERS: "altclip cosmos3_edge kimi_k25 step3p7",
    Trait.USED_DIRECTLY: "deepseek_v4 falcon rwkv wavlm",
    Trait.USED_EARLY: """
bit blt bridgetower chinese_clip_vision_model clap clipseg clvp cvt d_fine deimv2 depth_pro dinov2
dinov2_with_registers dinov3_vit falcon falcon_mamba fastspeech2_conformer fastspeech2_conformer_with_hifigan
gpt_bigcode grounding-dino groupvit hiera ijepa kosmos-2 longt5 lw_detr mamba mamba2 mask2former mgp-str mlcd
mlcd_vision_model mm-grounding-dino modernbert modernbert-decoder modernvbert mt5 nanochat neomme oneformer owlv2
owlvit pe_audio pix2struct pop2piano pp_doclayout_v3 pp_doclayout_v4 pvt pvt_v2 radio recurrent_gemma regnet resnet
rf_detr rt_detr rt_detr_v2 rwkv sapiens2 seggpt siglip siglip2 siglip2_vision_model siglip_vision_model swiftformer
swin2sr switch_transformers t5 timesformer tipsv2_vision_model udop umt5 videoprism videoprism_vision_model vitdet
vjepa2 xclip xlstm
""",
    Trait.OTHER_SIZES: """
albert cosmos3_omni csm electra gemma3n gemma3n_text granite_speech5_encoder inkling inkling_mm_model inkling_text
kyutai_speech_to_text longcat_flash mllama mllama_text_model mobilebert modernbert modernbert-decoder moshi neomme
pix2struct rembert zamba zamba2 zaya
""",
    Trait.WRAPS_TEXT: """
gemma3n gemma4 idefics3 internvl kimi_k25 kimi_vl lfm2_vl llama4 llava minimax_m3_vl mistral3 muse_glimmer qwen2_5_vl
qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm step3p7
""",
    Trait.STACKED_BY_MLX: """
afmoe deepseek_v2 dots1 glm4_moe minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe
""",
    Trait.RUN_BY_MLX: "gpt2 kimi_linear llama4 minimax_m3_vl",
    Trait.EXAMINED: """
afmoe apertus arcee aria aria_text audioflamingo3 axk1 axk2 aya_vision bailing_hybrid bamba bart beam bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blip-2 bloom blt camembert
chameleon codegen cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni
cpmant ctrl cwm data2vec-text dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
deepseek_vl_hybrid diffllama diffusion_gemma doge dots1 dots3_note dots3_note_text electra emu3 encoder-decoder ernie
ernie4_5 ernie4_5_moe ernie4_5_vl_moe evolla exaone4 exaone4_5 exaone_moe falcon falcon_h1 falcon_mamba fast_vlm
flex_olmo flint florence2 fsmt fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm glm4 glm46v glm4_moe
glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmasr glmga got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo
gpt_neox gpt_neox_japanese gpt_oss gptj granite granite4_vision granite_docling granite_speech granite_speech_plus
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2 inkling2_text
inkling_mm_model inkling_text instructblip instructblipvideo internlm3 internvl iquestcoder jais2 jamba janus jetmoe
kimi_k25 kimi_linear kolibri1 kosmos-2 kosmos-2.5 kyutai_speech_to_text laguna led lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision longcat_flash longt5 m2m_100
mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax
minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3 mistral4 mistral_large4 mixtral mllama
modernbert-decoder molmo2 moshi moss_transcribe_diarize mpt mt5 muse_glimmer muse_spark musicflamingo musicgen
musicgen_melody mvp nanochat nemo_speechlm nemotron nemotron_h nemotron_h_omni nllb-moe nomic_bert olmo olmo2 olmo3
olmo_hybrid olmoe openai-gpt opt ovis2 paddleocr_vl paligemma pegasus pegasus_x perception_lm persimmon phi phi3
phi4_multimodal phimoe pi0 pix2struct plbart pp_chart2table pp_formulanet prophetnet qianfan_ocr qwen2 qwen2_5_omni
qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text
recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seamless_m4t seamless_m4t_v2
seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7 switch_transformers t5 t5gemma t5gemma2
trocr udop umt5 unlimited_ocr vaultgemma vibevoice_asr video_llama_3 video_llava vipllava vision-encoder-decoder voxtral
voxtral_realtime whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
""",
}
