"""A training script as a user of PaddleFormers' Trainer writes one."""

from dataclasses import dataclass, field

import paddle
from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe
from paddleformers.transformers.configuration_utils import LlmMetaConfig, llmmetaclass

from data import collate, samples
from sizes import LENGTH, SAMPLES, SEED, SIZES


@dataclass
@llmmetaclass
class Arguments(TrainingArguments):
    model: str = field(default="", metadata={"help": "the model's folder"})
    make_model: bool = field(default=False, metadata={"help": "only make the model there, with random weights"})
    ragged: bool = field(default=False, metadata={"help": "micro-batches of different lengths"})


def make_model(folder):
    paddle.seed(SEED)
    config = LlamaConfig(**SIZES, tie_word_embeddings=False, fuse_rms_norm=False)  # the fused one has no CPU kernel
    LlamaForCausalLM(config).save_pretrained(folder)


def load_model(arguments):
    config = LlamaConfig.from_pretrained(arguments.model)
    LlmMetaConfig.set_llm_config(config, arguments)
    config._attn_implementation = "sdpa"
    config.max_sequence_length = LENGTH
    model = LlamaForCausalLMPipe if arguments.pipeline_model_parallel_size > 1 else LlamaForCausalLM
    return model.from_pretrained(arguments.model, config=config, dtype="float32")


def main():
    (arguments,) = PdArgumentParser(Arguments).parse_args_into_dataclasses()
    paddle.set_device(arguments.device)
    if arguments.make_model:
        return make_model(arguments.model)
    trainer = Trainer(
        model=load_model(arguments),
        args=arguments,
        data_collator=collate,
        train_dataset=samples(SAMPLES, arguments.ragged),
        eval_dataset=samples(2 * arguments.gradient_accumulation_steps, arguments.ragged, SEED + 1),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    return None


if __name__ == "__main__":
    main()
