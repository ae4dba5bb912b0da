"""A tiny task for trainers: prompts of digits, reward for even digits in the answer."""

from __future__ import annotations

from typing import Any

from tests.tiny import tiny_hf_model

DIGITS = [str(i) for i in range(10)]
WORDS = ["<pad>", "<eos>", *DIGITS, *(f"w{i}" for i in range(20))]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}w0 {{ m['content'] }} {% endfor %}w1"
    return fast


def policy(seed: int = 0) -> Any:
    """A fresh random Llama; trainers change it in place."""
    model = tiny_hf_model(seed=seed, vocab_size=len(WORDS), max_position_embeddings=64, eos_token_id=1, pad_token_id=0)
    model.generation_config.eos_token_id = 1
    return model


def even_share(completions: list[Any], **_: Any) -> list[float]:
    """Reward: share of even digits among the words of the completion."""
    rewards = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        words = text.split()
        rewards.append(sum(w in DIGITS[::2] for w in words) / max(len(words), 1))
    return rewards


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
