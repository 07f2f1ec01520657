"""What ``paddleformers-cli train`` reads beside a model: a tokenizer, texts and a configuration."""

import json
import random

from sizes import LENGTH, SAMPLES, SEED, SIZES

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = SPECIAL + [f"w{k}" for k in range(len(SPECIAL), SIZES["vocab_size"])]


def write_tokenizer(model):
    """One word, one token, in the model's folder."""
    special = [
        {"id": k, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for k, word in enumerate(SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: k for k, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LENGTH, **names}
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_texts(path, count, seed):
    """A text of random words a line."""
    choices = random.Random(seed).choices
    lines = [json.dumps({"text": " ".join(choices(WORDS[len(SPECIAL) :], k=LENGTH - 1))}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_config(folder, model, options):
    """FOLDER/train.yaml, whose path is returned, and the texts that it names. JSON is YAML, too."""
    write_tokenizer(model)
    write_texts(folder / "train.jsonl", SAMPLES, SEED)
    write_texts(folder / "eval.jsonl", 2 * options["gradient_accumulation_steps"], SEED + 1)
    config = {
        **options,
        "stage": "PT",
        "model_name_or_path": str(model),
        "_attn_implementation": "sdpa",
        "fine_tuning": "full",
        "train_dataset_type": "erniekit",
        "eval_dataset_type": "erniekit",
        "train_dataset_path": str(folder / "train.jsonl"),
        "eval_dataset_path": str(folder / "eval.jsonl"),
        "train_dataset_prob": "1.0",
        "eval_dataset_prob": "1.0",
        "max_seq_len": LENGTH,
        "packing": False,
    }
    path = folder / "train.yaml"
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path
