"""The size of the tiny Llama and of its data, the same for all clients."""

SIZES = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)
LENGTH = 16
SEED = 7
SAMPLES = 64
STEPS = 4
EVERY = 2  # steps between evaluations, and from the start to the checkpoint
