"""What modules of transformers' classes are for, by the names that the classes give them."""

#: Modules whose matrix is looked up by token, and multiplied with where the head is tied.
TOKEN_TABLES = frozenset({"embed_tokens", "embed_in", "word_embeddings", "wte"})
#: Modules whose matrix is looked up by position.
POSITION_TABLES = frozenset({"embed_positions", "wpe"})
#: The linear that makes logits, where it has a matrix of its own.
HEADS = frozenset({"lm_head", "embed_out"})
#: Linears beside a list of experts, which choose among these.
ROUTERS = frozenset({"gate", "router"})
#: Linears that make queries, keys and values, apart or together.
ATTENTION_INPUTS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"}
)


def module_of(tensor: str) -> str:
    """The module that a tensor is the weight or bias of."""
    return tensor.rpartition(".")[0].rpartition(".")[2]
