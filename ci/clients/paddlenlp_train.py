"""A training script as a user of PaddleNLP's Trainer writes one, for 2.8 and 3.0."""

import zlib  # noqa: F401, before Paddle, whose own copy of it breaks Python's in 2.6
from dataclasses import dataclass, field

import paddle
from paddlenlp.trainer import PdArgumentParser, Trainer, TrainingArguments
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe

from data import collate, samples
from sizes import SAMPLES, SEED, SIZES


@dataclass
class Arguments(TrainingArguments):
    model: str = field(default="", metadata={"help": "the model's folder"})
    make_model: bool = field(default=False, metadata={"help": "only make the model there, with random weights"})
    virtual_pp_degree: int = field(default=1, metadata={"help": "chunks on each pipeline stage"})
    ragged: bool = field(default=False, metadata={"help": "micro-batches of different lengths"})


class InOrder(Trainer):
    """Takes the samples in their order, as PaddleNLP's own pretraining does.

    By default one process shuffles in another way than several.
    """

    def _get_train_sampler(self):
        return paddle.io.DistributedBatchSampler(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            num_replicas=self.args.dataset_world_size,
            rank=self.args.dataset_rank,
            drop_last=True,
        )


def make_model(folder):
    paddle.seed(SEED)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)


def load_model(arguments):
    config = LlamaConfig.from_pretrained(
        arguments.model,
        tensor_parallel_degree=arguments.tensor_parallel_degree,
        tensor_parallel_rank=arguments.tensor_parallel_rank,
        virtual_pp_degree=arguments.virtual_pp_degree,
        use_flash_attention=False,
    )
    model = LlamaForCausalLMPipe if arguments.pipeline_parallel_degree > 1 else LlamaForCausalLM
    return model.from_pretrained(arguments.model, config=config, dtype="float32")


def main():
    (arguments,) = PdArgumentParser(Arguments).parse_args_into_dataclasses()
    paddle.set_device(arguments.device)
    if arguments.make_model:
        return make_model(arguments.model)
    trainer = InOrder(
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
