"""Bad files, as data: what stands in them instead of what is expected."""

from tiny_models import TINY

DEEP = {"lists": "[" * 20_000 + "]" * 20_000, "objects": '{"a":' * 20_000 + "1" + "}" * 20_000}
NO_JSON = {
    **DEEP, "nothing": "", "half an object": "{", "a list": "[]", "a number": "5", "null": "null", "text": '"x"',
    "NaN": "NaN", "no text": b"\xff\xfe", "zeros": b"\x00" * 50, "a comma too many": '{"a": 1,}',
}  # fmt: skip

LLAMA = TINY["llama"]
_NO_SIZES = (2.5, "two", True, [0])
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "head_dim",
         "num_key_value_heads", "max_position_embeddings")  # fmt: skip
MODELS = [
    *({**LLAMA, name: value} for name in SIZES for value in _NO_SIZES),
    *({**LLAMA, name: value} for name in ("hidden_size", "num_attention_heads", "head_dim") for value in (0, -4)),
    {**LLAMA, "num_hidden_layers": 10**15}, {**LLAMA, "hidden_size": 10**15},
    *(
        {**LLAMA, **change}
        for change in (
            {"hidden_size": 63}, {"num_attention_heads": 3}, {"hidden_act": "sideways"}, {"hidden_act": 5},
            {"attention_dropout": "x"}, {"rms_norm_eps": "x"},
            {"initializer_range": "x"}, {"rope_theta": "x"}, {"rope_scaling": 5}, {"head_dim": 7},
            {"pad_token_id": 600}, {"pad_token_id": "x"}, {"bos_token_id": [1]}, {"tie_word_embeddings": "x"},
            {"torch_dtype": "float99"}, {"attention_bias": "x"}, {"mlp_bias": 7}, {"model_type": 5},
            {"model_type": ""}, {"model_type": "lama"}, {"model_type": "x" * 1000}, {"id2label": 5},
            {"quantization_config": {"quant_method": "bitsandbytes"}}, {"auto_map": 5}, {"layer_types": ["x"]},
            {"use_cache": "x"}, {"model_type": "pop2piano"}, {"model_type": None},
            {"_attn_implementation": "evil/kernel"}, {"text_config": {"experts_implementation": "evil/kernel"}},
        )
    ),
    *({"model_type": "t5", name: -1} for name in ("d_model", "d_ff", "num_heads")),
    *({"model_type": "gpt2", **change} for change in ({"n_embd": 7}, {"n_head": 0}, {"n_inner": -1})),
    {"model_type": "bert", "num_attention_heads": 5},
    *({"model_type": "vit", name: 0} for name in ("patch_size", "image_size", "num_channels")),
    *({"model_type": "whisper", name: -1} for name in ("encoder_layers", "decoder_layers", "num_mel_bins", "d_model")),
    {"model_type": "wav2vec2", "conv_dim": []}, {"model_type": "wav2vec2", "conv_dim": 5},
    {"model_type": "mamba", "state_size": -1}, {"model_type": "mamba", "conv_kernel": 0},
    {"model_type": "resnet", "depths": []},
    {"model_type": "llama", "hidden_size": {"a": 1}}, {},
]  # fmt: skip

BASELINES = [
    {"learning_rate": "fast"}, {"learning_rate": -1}, {"learning_rate": [1]}, {"learning_rate": True},
    '{"learning_rate": NaN}', '{"learning_rate": 1e400}', {"lr_scheduler_type": "sideways"},
    {"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_kwargs": "x"}, {"lr_scheduler_kwargs": {"speed": 1}},
    {"adam_beta1": 5}, {"adam_beta2": -0.1}, {"adam_epsilon": "x"}, {"adam_epsilon": -1}, {"weight_decay": "x"},
    {"weight_decay": -1}, {"max_grad_norm": -3}, {"max_grad_norm": "x"}, {"warmup_steps": -5}, {"warmup_steps": "x"},
    {"num_train_epochs": "many"}, {"max_steps": "x"}, {"seed": -1}, {"seed": "x"}, {"seed": 2**32}, {"data_seed": "x"},
    {"optim": "magic"}, {"optim": 5}, {"optim": "adamw_hf"}, {"bf16": "perhaps"}, {"fp16": "yes"}, {"tf32": 3},
    {"bf16": True, "fp16": True}, {"gradient_checkpointing": "x"}, {"gradient_checkpointing_kwargs": 5},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}}, {"dataloader_num_workers": -1},
    {"dataloader_num_workers": 10**9}, {"dataloader_num_workers": 1.5}, {"dataloader_num_workers": "two"},
    {"dataloader_prefetch_factor": -2}, {"torch_compile": "x"}, {"torch_compile_backend": "x"},
    {"torch_compile_mode": "x"}, {"label_smoothing_factor": 7}, {"neftune_noise_alpha": "x"}, {"optim_args": 5},
    {"per_device_train_batch_size": 0}, {"per_device_train_batch_size": 10**30},
    {"per_device_train_batch_size": True}, {"gradient_accumulation_steps": "4"}, {"gradient_accumulation_steps": -1},
    {"eval_strategy": "sometimes"}, {"save_strategy": "x"}, {"logging_strategy": "x"}, {"logging_steps": "x"},
    {"report_to": 5}, {"accelerator_config": 5}, {"accelerator_config": {"nonsense": 1}},
    {"per_device_eval_batch_size": 0}, {"per_device_eval_batch_size": "x"}, {"remove_unused_columns": "x"},
    {"label_names": 5}, {"use_cpu": "x"}, {"full_determinism": "x"}, {"use_liger_kernel": "x"},
    {"liger_kernel_config": 5}, {"torch_empty_cache_steps": "x"}, {"train_sampling_strategy": "x"},
    {"learing_rate": 1e-4}, {"warmup_ratio": 0.1}, {"metric_for_best_model": 5}, {"hub_strategy": "x"},
    {"fsdp": "full_shard"}, {"deepspeed": "zero.json"}, {"auto_find_batch_size": True}, {"no_cuda": True},
    {"group_by_length": True},
]  # fmt: skip

_SPACE = "description: d\nparameters:\n  "
SPACES = [
    "a: " + "[" * 5000 + "]" * 5000, DEEP["lists"], "", "x", "5", "{}", "{", "&a [*a]", "!!python/object:os.system x",
    "a: b: c", b"\xff\xfe\x00", "\t- x", "description: d\nparameters: {}", "description: d\nparameters: [1]",
    "description: 5\nparameters:\n  precision: {choices: [fp32]}", "parameters:\n  precision: {choices: [fp32]}",
    *(
        _SPACE + line
        for line in (
            "precison: {choices: [fp32]}", "precision: {choices: []}", "precision: {choices: [fp99]}",
            "optim: {choices: [magic]}", "precision: {choices: fp32}", "precision: {choices: [fp32, fp32]}",
            "precision: {choices: [[fp32]]}", "precision: {}", "precision: {choices: [fp32], when: {x: [1]}}",
            "precision: {choices: [fp32], from_effort: heroic}", "per_device_train_batch_size: {choices: [0]}",
            "per_device_train_batch_size: {choices: [-4]}", "per_device_train_batch_size: {choices: [1.5]}",
            "dataloader_num_workers: {choices: [-1]}", "dataloader_num_workers: {choices: [100000]}",
            "adapter: {choices: [magic]}", "adapter.rank: {choices: [8]}", "quantization: {choices: [int3]}",
            "checkpointing: {choices: [sometimes]}", "parallelism.sharding: {choices: [zero_9]}",
            "train_sampling_strategy: {choices: [x]}", "torch_compile_mode: {choices: [x]}",
            "packing: {choices: [maybe]}", "tf32: {choices: [3]}",
            *(
                f"precision: {{choices: [fp32]}}\n{rest}"
                for rest in (
                    "rules: 5", "rules:\n  - forbid: {x: [1]}\n    reason: r",
                    "rules:\n  - forbid: {}\n    reason: r", "rules:\n  - forbid: {precision: [fp32]}", "extra: 1",
                    "  precision: {choices: [bf16]}",
                )
            ),
        )
    ),
]  # fmt: skip

# Name and content of data.
DATA = [
    *(
        (f"d.{ending}", content)
        for ending in ("jsonl", "json")
        for content in (
            DEEP["lists"], "", "{", "5", b"\xff\xfe\x00\x01", '{"text": 5}', '{"text": ""}\n', "\n\n\n", '{"a": 1}',
            '{"text": "xxxx"}\n{', '{"messages": 5}', '[{"text": "a"}, 5]',
        )
    ),
    ("d.csv", ""), ("d.csv", "a,b\n1"), ("d.csv", b"\xff"), ("d.parquet", b"PAR1"), ("d.parquet", ""), ("d.txt", ""),
    ("d.xyz", "x"), ("d", "x"), ("d.txt", b"\xff\xfe\x00"),
]  # fmt: skip

# A recipe, and data that it can't be trained on.
PROMPTS = [
    *(
        (name, content)
        for name in ("sft", "dpo", "kto", "grpo")
        for content in ("", "{", "5", '{"nothing": 1}\n', '{"prompt": 5}\n', '{"messages": []}\n')
    ),
    ("dpo", '{"prompt": "a", "chosen": "b"}\n'), ("dpo", '{"prompt": "a", "chosen": "b", "rejected": 5}\n'),
    ("kto", '{"prompt": "a", "completion": "b"}\n'), ("kto", '{"prompt": "a", "completion": "b", "label": "x"}\n'),
    ("reward", '{"chosen": "b"}\n'), ("sft", '{"messages": [{"role": "user"}]}\n'),
    ("sft", '{"prompt": "a", "completion": null}\n'), ("grpo", '{"prompt": [{"role": 5}]}\n'),
]  # fmt: skip

# Fields of a best-config.json that were changed.
ANSWERS = [
    {"schema_version": 99}, {"schema_version": "x"}, {"best": None}, {"best": 5}, {"workload": {}}, {"extra": 1},
    {"trials": "x"}, {"speedup": "fast"},
]  # fmt: skip
VERSIONS = ("x", "", "5", "5.x", "..", "5." + "9" * 5000, 5)
