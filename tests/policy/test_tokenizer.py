# pyright: basic
from hypothesis import given
from hypothesis import strategies as st

from etude.policy.tokenizer import SPECIAL_TOKENS, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", '{"name": "shell", "arguments": {"command": "ls"}}'] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


@given(st.text())
def test_any_text_comes_back_exactly(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_are_one_token_each():
    assert [TOKENIZER.encode(token).ids for token in SPECIAL_TOKENS] == [[0], [1], [2], [3]]


def test_the_vocabulary_is_as_large_as_asked_and_learned_from_the_texts():
    assert 260 < TOKENIZER.get_vocab_size() <= 300
    assert len(TOKENIZER.encode("return").ids) < len("return")


def test_the_envelope_of_a_tool_call_can_become_one_token():
    larger = train_tokenizer(TEXTS, vocab_size=400)
    assert len(larger.encode('{"name": "shell", "arguments": {"command": "').ids) == 1


def test_the_same_texts_give_the_same_tokenizer():
    assert train_tokenizer(TEXTS, vocab_size=300).to_str() == TOKENIZER.to_str()


def test_a_digit_and_a_line_end_are_never_part_of_a_longer_token():
    longer = train_tokenizer(["x = 1234\nx = 1234\n"] * 100, vocab_size=320)
    assert not [token for token in longer.get_vocab() if len(token) > 1 and "Ċ" in token[1:]]
    assert len(longer.encode("1234").ids) == 4
